// A pure read of memory, one table per instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

struct StreamTable {
  // XOR of num_words 64-bit words. words: aligned to 8 bytes.
  uint64_t (*exclusive_or)(const uint64_t* words, size_t num_words);
};

}  // namespace headrace
