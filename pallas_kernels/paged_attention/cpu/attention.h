// One step of attention over paged keys and values, as the parts of this package see it.
//
// Rules that make a row's bits independent of batch, chunking and threads: keys are cut at multiples of kBlock from the
// start of the sequence; each block gives a part (largest score, sum of weights, weighted values) by itself; parts are
// folded into the row's state in ascending order. Within a part every sum has one fixed order, whatever the tile.
#pragma once
#include <cstdint>

namespace headrace::attention {

constexpr int kBlock = 64;        // keys of a block
constexpr int kMaxHeadDim = 256;  // and a multiple of 8
constexpr int kMaxGroup = 256;    // query heads of a key head
constexpr float kLowest = -1e30f; // start of the running maximum: finite, because a difference of infinities is NaN

enum class Stored { kFloat32, kBFloat16, kInt8 };

struct Step {
  const float *qkv, *cos, *sin;  // [T, (N + 2K) * H], [T, H / 2] twice
  void* pages;                   // [R, K, W, 2H]
  float* scales;                 // [R, K, 2, W]; kInt8 only
  const float* sinks;            // [N] or null
  const int32_t *position, *table, *kv_len, *blk_seq, *blk_pos, *blk_len;  // AttnMeta's arrays
  float* out;                    // [T, N * H]
  int rows, blocks, block_tokens, sequences, table_pages, heads, kv_heads, head_dim, page_tokens;
  int64_t first_row, pool_rows;
  float scale, soft_cap;         // soft_cap 0: none
  int window;                    // 0: none
  Stored stored;
};

// Tokens that follow each other in one sequence; token i sees keys below end + i.
struct Tile {
  int token, count, sequence, end;
};

// What blocks [first, first + count) of one tile and key head gave, where different threads compute them.
struct Parts {
  float *top, *total, *values;  // [count, rows] twice, [count, rows, padded]
  int first, count;
};

struct Functions {
  // Rotates the token's keys and stores them and its values.
  void (*write)(const Step&, int token, int sequence, int position);
  // Blocks [first, last) of key head kv: all of the tile's blocks into out where parts is null, else into parts.
  void (*attend)(const Step&, const Tile&, int kv, int first, int last, const Parts* parts, float* scratch);
  // Folds all parts of a tile and key head into out.
  void (*merge)(const Step&, const Tile&, int kv, const Parts&, float* scratch);
};

// Internal linkage: what is compiled for several instruction sets must not be merged by the linker.
namespace {

inline int group_of(const Step& step) { return step.heads / step.kv_heads; }
inline int padded_of(const Step& step) { return (step.head_dim + 15) & ~15; }  // values between rows of scratch
inline int64_t page_row(const Step& step, int sequence, int position) {
  return step.first_row + step.table[int64_t(sequence) * step.table_pages + position / step.page_tokens];
}
inline int first_key(const Step& step, const Tile& tile) {
  return step.window && tile.end > step.window ? tile.end - step.window : 0;
}
inline int last_key(const Tile& tile) { return tile.end + tile.count - 1; }  // exclusive

// Tile rows (tokens times group) that one call of attend takes.
inline int most_rows(const Step& step) {
  const int fits = step.head_dim <= 128 ? 128 : 64;  // queries, results and one block of keys stay in 512 KB
  return group_of(step) > fits ? group_of(step) : fits;
}

// Memory of one thread.
inline int64_t scratch_floats(const Step& step) {
  const int64_t padded = padded_of(step), rows = most_rows(step);
  return 2 * kBlock * padded + rows * (2 * padded + kBlock + 6) + 2 * kBlock;
}

}  // namespace

}  // namespace headrace::attention
