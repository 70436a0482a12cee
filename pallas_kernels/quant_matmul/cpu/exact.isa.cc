// Products with float32 activations.
//
// One order of additions for every number of rows: a column has two chains of fused multiply-adds, over the first and
// over the second halves of the groups, each in ascending k, and their sum is the result. A weight is
// fma(u, scale, offset - zero * scale); without an offset that is scale * (u - zero), zero being a power of two.
// Few rows convert weights in registers; many rows convert a panel of weights into L1 once.
#include "quant_matmul/cpu/isa_kernels.h"
#include "quant_matmul/cpu/vectors.h"

namespace headrace::quant::HEADRACE_ISA {
namespace {

#if defined(HEADRACE_ISA_AVX512)
constexpr int kRows = 12, kPanel = 2, kDirectRows = 6;  // 24 accumulators of 32 registers
#elif defined(HEADRACE_ISA_AVX2)
constexpr int kRows = 6, kPanel = 2, kDirectRows = 4;  // 12 of 16
#else
constexpr int kRows = 5, kPanel = 4, kDirectRows = 4;  // 20 of 32
#endif
constexpr int kWidth = kPanel * kLanes;  // columns of a panel
constexpr int kDepth = 256;              // values along K of a panel: 32 KiB of AVX-512, else 16
constexpr int kChunk = 48;               // rows whose partial sums stay in L1

struct Factors {
  F scale, offset;
};
inline Factors ReadFactors(const uint8_t* block, int column, const Form& form) {
  const uint8_t *scales = block + form.ValueBytes(), *offsets = scales + form.ScaleBytes();
  const F scale = form.wide ? Load((const float*)scales + column) : LoadHalf(scales + 2 * column);
  const F shift = Mul(scale, Set(-float(form.zero)));
  if (!form.affine) return {scale, shift};
  return {scale, Add(form.wide ? Load((const float*)offsets + column) : LoadHalf(offsets + 2 * column), shift)};
}

// R rows times V vectors of columns from `first` on; R * V * 2 accumulators.
// Prefetches as many tiles ahead as are read together: weights of 66 MB at 1 and 2 rows are 1.3 to 1.9 times as fast as
// with 1 KiB ahead in the same tiles (AVX-512, one thread, best of 60, three alternating runs).
template <int R, int V, int kBits>
void Direct(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx, int first, float* out,
            int64_t ld) {
  const int64_t block_bytes = form.BlockBytes(), stride = groups * block_bytes;
  const int half = form.group / 2;
  const int64_t ahead = (V * kLanes + kTile - 1) / kTile * stride;
  const uint8_t* at[V];
  int column[V];
  for (int j = 0; j < V; j++) {
    const int c = first + j * kLanes;
    at[j] = tiles + c / kTile * stride;
    column[j] = c % kTile;
  }
  F sum[2][R][V];
  for (int h = 0; h < 2; h++)
    for (int r = 0; r < R; r++)
      for (int j = 0; j < V; j++) sum[h][r][j] = Zero();
  for (int64_t g = 0; g < groups; g++, x += form.group) {
    Factors factors[V];
    for (int j = 0; j < V; j++) {
      for (int64_t i = 0; i < block_bytes; i += 64) __builtin_prefetch(at[j] + ahead + i, 0, 1);
      factors[j] = ReadFactors(at[j], column[j], form);
    }
    if constexpr (kBits == 4) {
      for (int v = 0; v < half / 4; v++) {
        I packed[V];
        for (int j = 0; j < V; j++) packed[j] = LoadBytes(at[j] + 64 * v + 4 * column[j]);
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++)
#pragma GCC unroll 2
          for (int h = 0; h < 2; h++)
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) {
              const F w = Fma(Field<4>(packed[j], 8 * b + 4 * h), factors[j].scale, factors[j].offset);
#pragma GCC unroll 6
              for (int r = 0; r < R; r++) {
                sum[h][r][j] = Fma(w, Set(x[r * ldx + h * half + 4 * v + b]), sum[h][r][j]);
                HEADRACE_KEEP(sum[h][r][j]);
              }
            }
      }
    } else {
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++)
        for (int v = 0; v < half / 4; v++) {
#pragma GCC unroll 4
          for (int j = 0; j < V; j++) {
            const I packed = LoadBytes(at[j] + 16 * half * h + 64 * v + 4 * column[j]);
#pragma GCC unroll 4
            for (int b = 0; b < 4; b++) {
              const F w = Fma(Field<8>(packed, 8 * b), factors[j].scale, factors[j].offset);
#pragma GCC unroll 6
              for (int r = 0; r < R; r++) {
                sum[h][r][j] = Fma(w, Set(x[r * ldx + h * half + 4 * v + b]), sum[h][r][j]);
                HEADRACE_KEEP(sum[h][r][j]);
              }
            }
          }
        }
    }
    for (int j = 0; j < V; j++) at[j] += block_bytes;
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) Store(out + r * ld + first + j * kLanes, Add(sum[0][r][j], sum[1][r][j]));
}

template <int R, int V>
void DirectColumns(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx,
                   int64_t num_tiles, float* out, int64_t ld) {
  const int64_t columns = num_tiles * kTile, stride = groups * int64_t(form.BlockBytes());
  int64_t c = 0;
  for (; c + V * kLanes <= columns; c += V * kLanes) {
    const uint8_t* tile = tiles + c / kTile * stride;
    const int first = c % kTile;
    if (form.bits == 4)
      Direct<R, V, 4>(tile, form, groups, x, ldx, first, out + c - first, ld);
    else
      Direct<R, V, 8>(tile, form, groups, x, ldx, first, out + c - first, ld);
  }
  if constexpr (V > 1)
    if (c < columns) DirectColumns<R, V / 2>(tiles + c / kTile * stride, form, groups, x, ldx,
                                             (columns - c) / kTile, out + c, ld);
}

// Weights of groups g0 .. g1 and of V vectors of columns as float32 [2 halves][k][V * kLanes].
template <int V, int kBits>
void Unpack(const uint8_t* tiles, const Form& form, int64_t groups, int64_t g0, int64_t g1, float* panel) {
  const int64_t block_bytes = form.BlockBytes();
  const int half = form.group / 2;
  float* side[2] = {panel, panel + (g1 - g0) * half * V * kLanes};
  for (int64_t g = g0; g < g1; g++)
    for (int j = 0; j < V; j++) {
      const int c = j * kLanes, column = c % kTile;
      const uint8_t* block = tiles + (c / kTile * groups + g) * block_bytes;
      const Factors factors = ReadFactors(block, column, form);
      for (int h = 0; h < 2; h++)
        for (int v = 0; v < half / 4; v++) {
          const I packed = LoadBytes(block + (kBits == 8 ? 16 * half * h : 0) + 64 * v + 4 * column);
#pragma GCC unroll 4
          for (int b = 0; b < 4; b++) {
            const F u = kBits == 4 ? Field<4>(packed, 8 * b + 4 * h) : Field<8>(packed, 8 * b);
            Store(side[h] + ((g - g0) * half + 4 * v + b) * V * kLanes + c, Fma(u, factors.scale, factors.offset));
          }
        }
    }
}

// Adds the products of one half of the groups to sums [R][V * kLanes].
template <int R, int V>
void Block(const float* x, int64_t ldx, const float* panel, int64_t groups, int group, float* sums, bool is_first) {
  F sum[R][V];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) sum[r][j] = is_first ? Zero() : Load(sums + (r * V + j) * kLanes);
  for (int64_t g = 0; g < groups; g++, x += group)
    for (int i = 0; i < group / 2; i++, panel += V * kLanes) {
      F w[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) w[j] = Load(panel + j * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const F value = Set(x[r * ldx + i]);
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) sum[r][j] = Fma(w[j], value, sum[r][j]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) Store(sums + (r * V + j) * kLanes, sum[r][j]);
}

template <int R, int V>
void Blocks(int rows, const float* x, int64_t ldx, const float* panel, int64_t groups, int group, float* sums,
            bool is_first) {
  if constexpr (R > 0) {
    if (rows == R)
      Block<R, V>(x, ldx, panel, groups, group, sums, is_first);
    else
      Blocks<R - 1, V>(rows, x, ldx, panel, groups, group, sums, is_first);
  }
}

// Any number of rows times V vectors of columns.
template <int V>
void Panel(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx, int64_t rows,
           float* out, int64_t ld) {
  constexpr int kColumns = V * kLanes;
  alignas(64) float panel[kDepth * kColumns], sums[2][kChunk * kColumns];
  const int64_t depth = kDepth / form.group;
  for (int64_t r0 = 0; r0 < rows; r0 += kChunk) {
    const int64_t count = rows - r0 < kChunk ? rows - r0 : kChunk;
    for (int64_t g0 = 0; g0 < groups; g0 += depth) {
      const int64_t g1 = g0 + depth < groups ? g0 + depth : groups;
      if (form.bits == 4)
        Unpack<V, 4>(tiles, form, groups, g0, g1, panel);
      else
        Unpack<V, 8>(tiles, form, groups, g0, g1, panel);
      for (int64_t r = 0; r < count; r += kRows)
        for (int h = 0; h < 2; h++)
          Blocks<kRows, V>(count - r < kRows ? count - r : kRows,
                           x + (r0 + r) * ldx + g0 * form.group + h * form.group / 2, ldx,
                           panel + h * (g1 - g0) * form.group / 2 * kColumns, g1 - g0, form.group,
                           sums[h] + r * kColumns, g0 == 0);
    }
    for (int64_t r = 0; r < count; r++)
      for (int c = 0; c < kColumns; c += kLanes)
        Store(out + (r0 + r) * ld + c, Add(Load(sums[0] + r * kColumns + c), Load(sums[1] + r * kColumns + c)));
  }
}

}  // namespace

void Exact(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx, int64_t rows,
           int64_t num_tiles, float* out, int64_t ld) {
  if (rows <= kDirectRows) {
    switch (rows) {
      case 1: return DirectColumns<1, 4>(tiles, form, groups, x, ldx, num_tiles, out, ld);
      case 2: return DirectColumns<2, 2>(tiles, form, groups, x, ldx, num_tiles, out, ld);
      case 3: return DirectColumns<3, 2>(tiles, form, groups, x, ldx, num_tiles, out, ld);
#if defined(HEADRACE_ISA_AVX512)
      case 4: return DirectColumns<4, 2>(tiles, form, groups, x, ldx, num_tiles, out, ld);
      case 5: return DirectColumns<5, 2>(tiles, form, groups, x, ldx, num_tiles, out, ld);
      case 6: return DirectColumns<6, 2>(tiles, form, groups, x, ldx, num_tiles, out, ld);
#else
      case 4: return DirectColumns<4, 1>(tiles, form, groups, x, ldx, num_tiles, out, ld);
#endif
    }
    return;
  }
  constexpr int kTiles = kWidth / kTile;
  const int64_t stride = groups * int64_t(form.BlockBytes());
  int64_t t = 0;
  for (; t + kTiles <= num_tiles; t += kTiles)
    Panel<kPanel>(tiles + t * stride, form, groups, x, ldx, rows, out + t * kTile, ld);
  for (; t < num_tiles; t++)
    Panel<kPerTile>(tiles + t * stride, form, groups, x, ldx, rows, out + t * kTile, ld);
}

}  // namespace headrace::quant::HEADRACE_ISA
