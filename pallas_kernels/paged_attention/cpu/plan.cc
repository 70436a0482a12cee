// How a step is cut into tiles and items, which of its indices are refused, and how the items run.
#include "paged_attention/cpu/plan.h"

#include <algorithm>
#include <cstring>

#include "native/cpu_features.h"
#include "native/team.h"

HEADRACE_DECLARE(headrace::attention::Functions, GetAttentionFunctions)

namespace headrace::attention {
namespace {

constexpr int kTransposeRows = 4;      // what reading a block costs, in rows of a tile
constexpr int kItemsPerThread = 4;     // so that threads end within a quarter of their work of each other
constexpr int kMaxTileTokens = 32;
constexpr int64_t kMaxPartsFloats = 8 << 20;  // 32 MB; beyond it, contexts are not split
constexpr int64_t kAloneCost = 64;     // rows times blocks: below, waking a thread costs more than it gives

int blocks_first(const Step& step, const Tile& tile) { return first_key(step, tile) / kBlock; }
int blocks_last(const Tile& tile) { return (last_key(tile) + kBlock - 1) / kBlock; }

int tile_tokens(const Step& step, int threads) {
  const int fits = std::max(1, most_rows(step) / group_of(step));
  int64_t tokens = 0;
  for (int j = 0; j < step.blocks; j++) tokens += step.blk_len[j];
  int count = std::min(kMaxTileTokens, fits);
  while (threads > 1 && count > 8 && tokens * step.kv_heads < int64_t(count) * kItemsPerThread * threads) count /= 2;
  return count;
}

std::vector<Tile> tiles_of(const Step& step, int threads) {
  std::vector<Tile> tiles;
  for (int b = 0; b < step.rows; b++)
    if (step.kv_len[b] > 0) tiles.push_back({b, 1, b, step.kv_len[b]});
  const int most = tile_tokens(step, threads);
  for (int j = 0; j < step.blocks; j++)
    for (int i = 0; i < step.blk_len[j]; i += most)
      tiles.push_back({step.rows + j * step.block_tokens + i, std::min(most, step.blk_len[j] - i), step.blk_seq[j],
                       step.blk_pos[j] + i + 1});
  return tiles;
}

float* aligned(std::vector<float>& memory, int64_t count) {
  if (int64_t(memory.size()) < count + 16) memory.resize(count + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

}  // namespace

std::string refusal(const Step& step) {
  const int64_t most = int64_t(step.table_pages) * step.page_tokens;
  auto sequence = [&](int z, int64_t tokens, const char* what, int index) -> std::string {
    const std::string name = std::string(what) + " " + std::to_string(index);
    if (tokens > most)
      return name + " reads " + std::to_string(tokens) + " tokens of a page table of " + std::to_string(most);
    for (int64_t i = 0; i * step.page_tokens < tokens; i++) {
      const int64_t row = step.first_row + step.table[int64_t(z) * step.table_pages + i];
      if (step.table[int64_t(z) * step.table_pages + i] < 0 || row < 0 || row >= step.pool_rows)
        return name + " has page row " + std::to_string(row) + " of a pool of " + std::to_string(step.pool_rows);
    }
    return "";
  };
  for (int b = 0; b < step.rows; b++) {
    const int length = step.kv_len[b], position = step.position[b];
    if (length < 0) return "decode row " + std::to_string(b) + " has kv_len " + std::to_string(length);
    if (length && (position < 0 || position >= length))
      return "decode row " + std::to_string(b) + " has position " + std::to_string(position) + " of " +
             std::to_string(length) + " tokens";
    const std::string why = sequence(b, length, "decode row", b);
    if (!why.empty()) return why;
  }
  for (int j = 0; j < step.blocks; j++) {
    const int length = step.blk_len[j];
    if (length < 0 || length > step.block_tokens)
      return "block " + std::to_string(j) + " has " + std::to_string(length) + " of " +
             std::to_string(step.block_tokens) + " tokens";
    if (!length) continue;
    if (step.blk_seq[j] < 0 || step.blk_seq[j] >= step.sequences)
      return "block " + std::to_string(j) + " has sequence " + std::to_string(step.blk_seq[j]) + " of " +
             std::to_string(step.sequences);
    if (step.blk_pos[j] < 0) return "block " + std::to_string(j) + " has position " + std::to_string(step.blk_pos[j]);
    const std::string why = sequence(step.blk_seq[j], int64_t(step.blk_pos[j]) + length, "block", j);
    if (!why.empty()) return why;
  }
  return "";
}

Plan planned(const Step& step, int threads) {
  Plan plan;
  plan.tiles = tiles_of(step, threads);
  const int group = group_of(step), kv_heads = step.kv_heads;
  auto cost = [&](const Tile& tile, int blocks) { return int64_t(blocks) * (tile.count * group + kTransposeRows); };
  int64_t total = 0;
  for (const Tile& tile : plan.tiles) total += cost(tile, blocks_last(tile) - blocks_first(step, tile)) * kv_heads;
  const int64_t target = threads > 1 ? std::max<int64_t>(1, total / (threads * kItemsPerThread)) : total + 1;
  struct Cut { int item, tile, kv, first, count; };
  std::vector<Cut> cuts;
  for (int t = 0; t < int(plan.tiles.size()); t++) {
    const Tile& tile = plan.tiles[t];
    const int first = blocks_first(step, tile), last = blocks_last(tile), rows = tile.count * group;
    const int64_t each = cost(tile, last - first);
    if (each * kv_heads <= target) {
      plan.items.push_back({each * kv_heads, t, 0, kv_heads, first, last, 0, false});
      continue;
    }
    const int wanted = int(std::min<int64_t>(last - first, (each + target - 1) / target));
    const int64_t floats = int64_t(last - first) * rows * (padded_of(step) + 2);
    const bool is_split = wanted > 1 && plan.parts_floats + floats * kv_heads <= kMaxPartsFloats;
    for (int kv = 0; kv < kv_heads; kv++) {
      if (!is_split) {
        plan.items.push_back({each, t, kv, kv + 1, first, last, 0, false});
        continue;
      }
      cuts.push_back({wanted, t, kv, first, last - first});
      plan.parts_floats += floats;
      for (int i = 0; i < wanted; i++) {
        const int from = first + (last - first) * i / wanted, to = first + (last - first) * (i + 1) / wanted;
        plan.items.push_back({cost(tile, to - from), t, kv, kv + 1, from, to, int(cuts.size()) - 1, true});
      }
    }
  }
  plan.num_splits = int(cuts.size());
  plan.splits = std::make_unique<Split[]>(cuts.size());
  for (size_t i = 0; i < cuts.size(); i++) {
    plan.splits[i].parts = {nullptr, nullptr, nullptr, cuts[i].first, cuts[i].count};
    plan.splits[i].items_left = cuts[i].item;
  }
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return plan;
}

namespace {

struct TokenAt { int token, sequence, position; };

std::vector<TokenAt> tokens_of(const Step& step, int64_t padding_zeroed) {
  std::vector<TokenAt> tokens;
  auto padding = [&](int token) { std::memset(step.out + token * padding_zeroed, 0, sizeof(float) * padding_zeroed); };
  for (int b = 0; b < step.rows; b++)
    step.kv_len[b] > 0 ? tokens.push_back({b, b, step.position[b]}) : padding(b);
  for (int j = 0; j < step.blocks; j++)
    for (int i = 0; i < step.block_tokens; i++) {
      const int token = step.rows + j * step.block_tokens + i;
      i < step.blk_len[j] ? tokens.push_back({token, step.blk_seq[j], step.blk_pos[j] + i}) : padding(token);
    }
  return tokens;
}

template <class Body>
void spread(int count, int helpers, Body& body, const std::function<void(std::function<void()>)>& schedule) {
  Team::Global().Run(count, helpers, body, [&](auto task) { schedule(std::function<void()>(task)); });
}

}  // namespace

void run(const Step& step, const Functions& functions, int threads,
         const std::function<void(std::function<void()>)>& schedule) {
  const int64_t width = int64_t(step.heads) * step.head_dim;
  const std::vector<TokenAt> tokens = tokens_of(step, width);
  constexpr int kWrites = 8;  // tokens of one item
  const int writes = (int(tokens.size()) + kWrites - 1) / kWrites;
  auto write = [&](int i) {
    for (int k = i * kWrites; k < std::min<int>((i + 1) * kWrites, tokens.size()); k++)
      functions.write(step, tokens[k].token, tokens[k].sequence, tokens[k].position);
  };
  spread(writes, writes > 1 ? threads - 1 : 0, write, schedule);  // every write is done before anything is read

  Plan plan = planned(step, threads);
  int64_t total = 0;
  for (const Item& item : plan.items) total += item.cost;
  static thread_local std::vector<float> parts_memory;
  float* next = plan.parts_floats ? aligned(parts_memory, plan.parts_floats + 48 * plan.num_splits) : nullptr;
  std::vector<int> rows_of(plan.num_splits);
  for (const Item& item : plan.items)
    if (item.is_split) rows_of[item.split] = plan.tiles[item.tile].count * group_of(step);
  for (int i = 0; i < plan.num_splits; i++) {
    Parts& parts = plan.splits[i].parts;
    const int64_t sums = int64_t(parts.count) * rows_of[i];
    parts.values = next, parts.top = next + sums * padded_of(step), parts.total = parts.top + sums;
    next += (sums * (padded_of(step) + 2) + 15) / 16 * 16;
  }
  const int64_t floats = scratch_floats(step);
  auto attend = [&](int i) {
    static thread_local std::vector<float> memory;
    float* scratch = aligned(memory, floats);
    const Item& item = plan.items[i];
    const Tile& tile = plan.tiles[item.tile];
    if (!item.is_split) {
      for (int kv = item.kv_first; kv < item.kv_last; kv++)
        functions.attend(step, tile, kv, item.block_first, item.block_last, nullptr, scratch);
      return;
    }
    Split& split = plan.splits[item.split];
    functions.attend(step, tile, item.kv_first, item.block_first, item.block_last, &split.parts, scratch);
    if (split.items_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      functions.merge(step, tile, item.kv_first, split.parts, scratch);
  };
  spread(int(plan.items.size()), total < kAloneCost ? 0 : threads - 1, attend, schedule);
}

const Functions* chosen_functions() { return HEADRACE_CHOSEN(GetAttentionFunctions); }

}  // namespace headrace::attention
