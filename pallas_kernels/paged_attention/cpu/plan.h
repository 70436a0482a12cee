// Cuts one step of attention into items of work that threads finish together, and runs them.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "paged_attention/cpu/attention.h"

namespace headrace::attention {

// One tile and key head whose blocks of keys are several items; whoever ends last folds the parts.
struct Split {
  Parts parts;
  std::atomic<int> items_left;
};

struct Item {
  int64_t cost;
  int tile, kv_first, kv_last, block_first, block_last;
  int split;  // index, where is_split
  bool is_split;
};

struct Plan {
  std::vector<Tile> tiles;
  std::vector<Item> items;  // the longest first
  std::unique_ptr<Split[]> splits;
  int num_splits = 0;
  int64_t parts_floats = 0;  // memory of all parts
};

// What is wrong with the step's indices, in words; empty where nothing is. Everything that a step reads or writes.
std::string refusal(const Step& step);

Plan planned(const Step& step, int threads);

// Writes, then attends. schedule: puts a function on another thread. Results do not depend on threads.
void run(const Step& step, const Functions& functions, int threads,
         const std::function<void(std::function<void()>)>& schedule);

// Of the chosen instruction set (all give the same bits), or null where this processor has none.
const Functions* chosen_functions();

}  // namespace headrace::attention
