// Attention of one tile of queries to the pages of its sequence, and the write of one token.
//
// For each block of keys: keys are transposed once (value by value, 64 keys side by side), so that scores and weighted
// values both are sums of a broadcast times a vector, in the order of values and of keys; kRows x kColumns of them stay
// in registers. A tile of many rows is near a matrix product's speed, one of few reads memory as fast as it comes.
#include "paged_attention/cpu/attention.h"
#include "native/vector.h"

namespace headrace::HEADRACE_ISA {
namespace {

using namespace attention;

inline int Least(int a, int b) { return a < b ? a : b; }
inline int Most(int a, int b) { return a > b ? a : b; }

// Value i turns with value i + H/2. The fused operations are explicit: a compiler's choice would change bits.
inline void Rotate(const float* x, const float* cos, const float* sin, int half, float factor, float* out) {
  for (int i = 0; i < half; i++) {
    const float low = x[i], high = x[i + half];
    out[i] = factor * __builtin_fmaf(low, cos[i], -(high * sin[i]));
    out[i + half] = factor * __builtin_fmaf(high, cos[i], low * sin[i]);
  }
}

inline uint16_t ToBFloat16(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void StoreValues(const float* x, int count, float* out, float*) { std::memcpy(out, x, sizeof(float) * count); }
inline void StoreValues(const float* x, int count, uint16_t* out, float*) {
  for (int i = 0; i < count; i++) out[i] = ToBFloat16(x[i]);
}
inline void StoreValues(const float* x, int count, int8_t* out, float* scale) {  // kv_quantization.to_pool's numbers
  float largest = 0;
  for (int i = 0; i < count; i++) {
    const float size = __builtin_fabsf(x[i]);
    largest = size > largest || size != size ? size : largest;  // a NaN stays
  }
  *scale = largest / 127.f;
  const float divisor = *scale > 0 ? *scale : 1;
  for (int i = 0; i < count; i++) {
    float level = x[i] / divisor;
    level = level > 127.f ? 127.f : level >= -127.f ? level : -127.f;
    out[i] = int8_t(__builtin_nearbyintf(level));
  }
}

template <class T>
void WriteToken(const Step& step, int token, int sequence, int position) {
  const int width = step.head_dim, half = width / 2, offset = position % step.page_tokens;
  const float* x = step.qkv + int64_t(token) * (step.heads + 2 * step.kv_heads) * width + step.heads * width;
  const float *cos = step.cos + int64_t(token) * half, *sin = step.sin + int64_t(token) * half;
  const int64_t head = page_row(step, sequence, position) * step.kv_heads;
  float key[kMaxHeadDim];
  for (int kv = 0; kv < step.kv_heads; kv++) {
    T* to = static_cast<T*>(step.pages) + ((head + kv) * step.page_tokens + offset) * 2 * width;
    float* scale = step.scales ? step.scales + (head + kv) * 2 * step.page_tokens + offset : nullptr;
    Rotate(x + kv * width, cos, sin, half, 1.f, key);
    StoreValues(key, width, to, scale);
    StoreValues(x + (step.kv_heads + kv) * width, width, to + width, scale ? scale + step.page_tokens : nullptr);
  }
}

// Where one thread works on one tile and key head. Rows are (token, query head) in this order.
struct Work {
  float *keys, *values;         // [value, key] and [key, value] of the block
  float *q, *acc, *weight;      // [rows, padded] twice, [rows, kBlock]
  float *top, *total, *part_top, *part_total, *keep, *take;  // [rows]
  float *key_scale, *value_scale;  // [kBlock]
  const float* value_at[kBlock];

  Work(const Step& step, float* p) {
    const int64_t padded = padded_of(step), rows = most_rows(step);
    auto next = [&p](int64_t count) { float* at = p; p += count; return at; };
    keys = next(kBlock * padded), values = next(kBlock * padded);
    q = next(rows * padded), acc = next(rows * padded), weight = next(rows * kBlock);
    key_scale = next(kBlock), value_scale = next(kBlock);
    top = next(rows), total = next(rows), part_top = next(rows), part_total = next(rows);
    keep = next(rows), take = next(rows);
  }
};

void LoadQueries(const Step& step, const Tile& tile, int kv, Work& work) {
  const int width = step.head_dim, half = width / 2, group = group_of(step);
  for (int i = 0; i < tile.count; i++) {
    const int64_t token = tile.token + i;
    const float* x = step.qkv + token * (step.heads + 2 * step.kv_heads) * width + kv * group * width;
    for (int g = 0; g < group; g++)
      Rotate(x + g * width, step.cos + token * half, step.sin + token * half, half, step.scale,
             work.q + (i * group + g) * int64_t(padded_of(step)));
  }
}

void StartState(const Step& step, const Tile& tile, int kv, Work& work) {
  const int group = group_of(step), rows = tile.count * group;
  for (int r = 0; r < rows; r++) {
    work.top[r] = step.sinks ? step.sinks[kv * group + r % group] : kLowest;
    work.total[r] = step.sinks ? 1.f : 0.f;
  }
  std::memset(work.acc, 0, sizeof(float) * rows * padded_of(step));
}

// Factors of the state so far and of the next part, and the folded maxima and sums.
void FoldFactors(int rows, const float* part_top, const float* part_total, Work& work) {
  for (int r = 0; r < rows; r++) {
    const float top = part_top[r] > work.top[r] ? part_top[r] : work.top[r];
    work.keep[r] = work.top[r] - top, work.take[r] = part_top[r] - top;
    work.top[r] = top;
  }
  for (int r = 0; r < rows; r += kLanes) {
    float keep[kLanes] = {}, take[kLanes] = {};
    const int count = Least(kLanes, rows - r);
    std::memcpy(keep, work.keep + r, sizeof(float) * count), std::memcpy(take, work.take + r, sizeof(float) * count);
    Store(keep, Exp(Load(keep))), Store(take, Exp(Load(take)));
    std::memcpy(work.keep + r, keep, sizeof(float) * count), std::memcpy(work.take + r, take, sizeof(float) * count);
  }
  for (int r = 0; r < rows; r++)
    work.total[r] = __builtin_fmaf(part_total[r], work.take[r], work.total[r] * work.keep[r]);
}

void Finish(const Step& step, const Tile& tile, int kv, Work& work) {
  const int width = step.head_dim, group = group_of(step);
  for (int r = 0; r < tile.count * group; r++) {
    float* out = step.out + (int64_t(tile.token + r / group) * step.heads + kv * group + r % group) * width;
    const float factor = work.total[r] == 0 ? 0.f : 1.f / work.total[r];
    const float* from = work.acc + r * int64_t(padded_of(step));
    for (int i = 0; i < width; i++) out[i] = from[i] * factor;
  }
}

template <int R, int N>
inline __attribute__((always_inline)) void ScoreTile(const float* q, int q_stride, const float* keys, int width,
                                                     float* out) {
  Vec sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum[r][n] = Set1(0);
  for (int h = 0; h < width; h++, keys += kBlock) {
    Vec key[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) key[n] = Load(keys + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec x = Set1(q[r * q_stride + h]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[r][n] = Fma(x, key[n], sum[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) Store(out + r * kBlock + n * kLanes, sum[r][n]);
}

// Scores of R rows with keys [first, last) of the block, and of whatever lies beside them in the same vectors.
template <int R>
void Scores(const Step& step, const Work& work, int row, int first, int last) {
  const int stride = padded_of(step), width = step.head_dim;
  const float* q = work.q + row * int64_t(stride);
  float* out = work.weight + row * int64_t(kBlock);
  int key = first / kLanes * kLanes;
  constexpr int kWide = kColumns * kLanes;
  for (; key % kWide == 0 && last - key > kWide - kLanes; key += kWide)
    ScoreTile<R, kColumns>(q, stride, work.keys + key, width, out + key);
  for (; key < last; key += kLanes) ScoreTile<R, 1>(q, stride, work.keys + key, width, out + key);
}

template <int R, int N>
inline __attribute__((always_inline)) void ValueTile(const float* weight, const float* const* value, int first,
                                                     int last, int column, const float* keep, const float* take,
                                                     float* out, int stride) {
  Vec sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum[r][n] = Set1(0);
  for (int j = first; j < last; j++) {
    const float* from = value[j] + column;
    Vec v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) v[n] = Load(from + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec x = Set1(weight[r * kBlock + j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[r][n] = Fma(x, v[n], sum[r][n]);
    }
  }
  out += column;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      float* to = out + r * int64_t(stride) + n * kLanes;
      Store(to, keep ? Fma(sum[r][n], Set1(take[r]), Mul(Load(to), Set1(keep[r]))) : sum[r][n]);
    }
}

// Weighted values of R rows: folded into acc, or as they are into out.
template <int R>
void Values(const Step& step, const Work& work, int row, int first, int last, float* parts) {
  const int stride = padded_of(step);
  const float* weight = work.weight + row * int64_t(kBlock);
  const float *keep = parts ? nullptr : work.keep + row, *take = work.take + row;
  float* out = (parts ? parts : work.acc) + row * int64_t(stride);
  int column = 0;
  for (; column + kColumns * kLanes <= stride; column += kColumns * kLanes)
    ValueTile<R, kColumns>(weight, work.value_at, first, last, column, keep, take, out, stride);
  for (; column < stride; column += kLanes)
    ValueTile<R, 1>(weight, work.value_at, first, last, column, keep, take, out, stride);
}

// Rows in groups of kRows; what is left over has code of its own, with the same sums.
#define HEADRACE_EACH_ROW(function, rows, ...)                         \
  do {                                                                 \
    int row = 0;                                                       \
    for (; row + kRows <= (rows); row += kRows) function<kRows>(__VA_ARGS__); \
    switch ((rows) - row) {                                            \
      case 1: function<1>(__VA_ARGS__); break;                         \
      case 2: function<2>(__VA_ARGS__); break;                         \
      case 3: function<3>(__VA_ARGS__); break;                         \
      case 4: function<4>(__VA_ARGS__); break;                         \
      case 5: function<5>(__VA_ARGS__); break;                         \
    }                                                                  \
  } while (0)

// Scores of one row to weights; keys outside [first, last) of the block weigh exactly 0.
void Softmax(const Step& step, const Work& work, int row, int first, int last) {
  float* weight = work.weight + row * int64_t(kBlock);
  if (first >= last) {
    std::memset(weight, 0, sizeof(float) * kBlock);
    work.part_top[row] = kLowest, work.part_total[row] = 0;
    return;
  }
  static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec unseen = Set1(-__builtin_inff());
  const bool is_whole = first <= 0 && last >= kBlock;
  Vec score[kBlock / kLanes], top = Set1(kLowest);
  for (int i = 0; i < kBlock / kLanes; i++) {
    Vec s = Load(weight + i * kLanes);
    if (step.scales) s = Mul(s, Load(work.key_scale + i * kLanes));
    if (step.soft_cap > 0) s = Capped(s, step.soft_cap);
    if (!is_whole) {
      const Vec key = Add(Load(kIndex), Set1(float(i * kLanes)));
      s = WhereLess(key, Set1(float(first)), unseen, WhereLess(key, Set1(float(last)), s, unseen));
    }
    score[i] = s;
    top = Max(top, s);
  }
  const float largest = Largest(top);
  const Vec base = Set1(largest);
  for (int i = 0; i < kBlock / kLanes; i++) Store(weight + i * kLanes, Exp(Sub(score[i], base)));
  work.part_top[row] = largest;
  work.part_total[row] = Sum64(weight);
  if (step.scales)
    for (int i = 0; i < kBlock; i += kLanes) Store(weight + i, Mul(Load(weight + i), Load(work.value_scale + i)));
}

// First of the eight tokens that start at this one; they share a page.
template <class T>
const T* TokensAt(const Step& step, const Tile& tile, int kv, int token) {
  const int64_t head = page_row(step, tile.sequence, token) * step.kv_heads + kv;
  return static_cast<const T*>(step.pages) + (head * step.page_tokens + token % step.page_tokens) * 2 * step.head_dim;
}

// Draws the block into the cache in the order of memory, before keys and values are read apart. Loads, eight in a row
// of code, because the processor's own prefetchers follow them (cold, one thread: 24 GB/s; one load in a loop 19), and
// prefetch instructions for all of the next block are slower than none for most of it. The first lines of each page
// behind are asked for ahead, so that the prefetchers find them. A decode step of 32 rows at 200 tokens: 17.8 ms
// with all of this, 22.8 with prefetches alone, 26.6 with nothing (one thread, 30 layers).
template <class T>
void DrawBlock(const Step& step, const Tile& tile, int kv, int block, int first, int last) {
  constexpr int kLine = 64, kAhead = 8;
  const int bytes = 8 * 2 * step.head_dim * int(sizeof(T)), end = last_key(tile);  // a multiple of two lines
  for (int j = first & ~7; j < last; j += 8) {
    const int token = block * kBlock + j;
    if (token + kBlock < end) {
      const char* ahead = reinterpret_cast<const char*>(TokensAt<T>(step, tile, kv, token + kBlock));
      for (int b = 0; b < Least(bytes, kAhead * kLine); b += kLine) __builtin_prefetch(ahead + b, 0, 3);
    }
    const volatile char* at = reinterpret_cast<const volatile char*>(TokensAt<T>(step, tile, kv, token));
    int b = 0;
    for (; b + 8 * kLine <= bytes; b += 8 * kLine)
#pragma GCC unroll 8
      for (int l = 0; l < 8; l++) (void)at[b + l * kLine];
    for (; b < bytes; b += kLine) (void)at[b];
  }
}

// Keys [first, last) of the block, transposed, and where its values are.
template <class T>
void ReadBlock(const Step& step, const Tile& tile, int kv, int block, int first, int last, Work& work) {
  const int width = step.head_dim, stride = 2 * width, padded = padded_of(step);
  const bool in_place = sizeof(T) == 4 && width == padded;  // else the last vectors reach behind a value, or the pool
  DrawBlock<T>(step, tile, kv, block, first, last);
  for (int j = first & ~7; j < last; j += 8) {  // eight tokens share a page
    const int token = block * kBlock + j, offset = token % step.page_tokens;
    const T* keys = TokensAt<T>(step, tile, kv, token);
    for (int i = 0; i < width; i += 8) Transpose8(keys + i, stride, work.keys + i * kBlock + j, kBlock);
    for (int u = 0; u < 8; u++) {
      const T* from = keys + u * stride + width;
      float* to = work.values + (j + u) * int64_t(padded);
      if (in_place) {
        work.value_at[j + u] = reinterpret_cast<const float*>(from);
        continue;
      }
      work.value_at[j + u] = to;
      for (int i = 0; i < width; i += 8) Widen8(from + i, to + i);
      if (padded > width) std::memset(to + width, 0, sizeof(float) * (padded - width));
    }
    if (step.scales) {
      const int64_t head = page_row(step, tile.sequence, token) * step.kv_heads + kv;
      const float* scale = step.scales + head * 2 * step.page_tokens + offset;
      std::memcpy(work.key_scale + j, scale, 32);
      std::memcpy(work.value_scale + j, scale + step.page_tokens, 32);
    }
  }
}

template <class T>
void Attend(const Step& step, const Tile& tile, int kv, int block_first, int block_last, const Parts* parts,
            float* scratch) {
  Work work(step, scratch);
  const int group = group_of(step), rows = tile.count * group, tile_first = first_key(step, tile);
  LoadQueries(step, tile, kv, work);
  if (!parts) StartState(step, tile, kv, work);
  for (int block = block_first; block < block_last; block++) {
    const int base = block * kBlock;
    const int first = Most(0, tile_first - base), last = Least(kBlock, last_key(tile) - base);
    ReadBlock<T>(step, tile, kv, block, first, last, work);
    HEADRACE_EACH_ROW(Scores, rows, step, work, row, first, last);
    for (int r = 0; r < rows; r++) {
      const int end = tile.end + r / group, start = step.window ? end - step.window : 0;
      Softmax(step, work, r, start - base, end - base);
    }
    float* out = nullptr;
    if (parts) {
      const int64_t at = int64_t(block - parts->first) * rows;
      std::memcpy(parts->top + at, work.part_top, sizeof(float) * rows);
      std::memcpy(parts->total + at, work.part_total, sizeof(float) * rows);
      out = parts->values + at * padded_of(step);
    } else {
      FoldFactors(rows, work.part_top, work.part_total, work);
    }
    HEADRACE_EACH_ROW(Values, rows, step, work, row, first, last, out);
  }
  if (!parts) Finish(step, tile, kv, work);
}

void Merge(const Step& step, const Tile& tile, int kv, const Parts& parts, float* scratch) {
  Work work(step, scratch);
  const int rows = tile.count * group_of(step), padded = padded_of(step);
  StartState(step, tile, kv, work);
  for (int b = 0; b < parts.count; b++) {
    const int64_t at = int64_t(b) * rows;
    FoldFactors(rows, parts.top + at, parts.total + at, work);
    for (int r = 0; r < rows; r++) {
      float* acc = work.acc + r * int64_t(padded);
      const float* part = parts.values + (at + r) * padded;
      const Vec keep = Set1(work.keep[r]), take = Set1(work.take[r]);
      for (int i = 0; i < padded; i += kLanes) Store(acc + i, Fma(Load(part + i), take, Mul(Load(acc + i), keep)));
    }
  }
  Finish(step, tile, kv, work);
}

void WriteAny(const Step& step, int token, int sequence, int position) {
  switch (step.stored) {
    case Stored::kFloat32: return WriteToken<float>(step, token, sequence, position);
    case Stored::kBFloat16: return WriteToken<uint16_t>(step, token, sequence, position);
    case Stored::kInt8: return WriteToken<int8_t>(step, token, sequence, position);
  }
}

void AttendAny(const Step& step, const Tile& tile, int kv, int first, int last, const Parts* parts, float* scratch) {
  switch (step.stored) {
    case Stored::kFloat32: return Attend<float>(step, tile, kv, first, last, parts, scratch);
    case Stored::kBFloat16: return Attend<uint16_t>(step, tile, kv, first, last, parts, scratch);
    case Stored::kInt8: return Attend<int8_t>(step, tile, kv, first, last, parts, scratch);
  }
}

}  // namespace

const Functions& GetAttentionFunctions() {
  static constexpr Functions all = {WriteAny, AttendAny, Merge};
  return all;
}

}  // namespace headrace::HEADRACE_ISA
