// The loops of an integer product, over tiles, groups and rows, for all instruction sets (integer_kernels.h).
//
// A group's values are prepared once and meet all rows (64 at a time), whose sums wait in the L1 cache; one or two
// rows keep their sums in registers. So any number of rows reads the weights once from memory, unpacked once.
#pragma once
#include "quant_matmul/cpu/integer_lanes.h"

namespace headrace::quant::HEADRACE_ISA {

constexpr int kRowsAtOnce = 64;  // their sums: 8 KiB

// Few rows wait for memory: fetch this far ahead in the stream of blocks. 2 threads, 30 cold int4 weights 576 x 3072,
// one row, two runs: 232 and 247 GFLOP/s with 1024 bytes, 350 and 323 with 4096, no more with 8192 and 16384.
constexpr int kAhead = 4096;
constexpr int kRowsWithFetch = 16;

struct Blocks {
  const uint8_t* first;
  ptrdiff_t tile_bytes;
  int64_t groups;
  Form form;
};

struct Records {
  const uint8_t* first;
  ptrdiff_t group_bytes;
};

// What the loop over groups of kTiles tiles reads kAhead bytes later: blocks of the same tiles, then of those behind.
template <int kTiles>
HEADRACE_INLINE void Fetch(const Blocks& w, int64_t g, int64_t ahead, int block_bytes) {
  int64_t at = (g + ahead) * block_bytes;
  if (at >= w.tile_bytes) at += (kTiles - 1) * w.tile_bytes;
#pragma GCC unroll 2
  for (int i = 0; i < kTiles; i++)
    for (int line = 0; line < block_bytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(w.first + i * w.tile_bytes + at + line), _MM_HINT_T1);
}

template <class Group, bool kAffine, int kRows, int kVectors>
HEADRACE_INLINE void AddGroup(const Group& group, const Lanes::Floats (&scale)[kVectors],
                              const Lanes::Floats (&offset)[kVectors], const uint8_t* x,
                              Lanes::Floats (&y)[kRows][kVectors]) {
  Lanes::Floats sums[kRows][kVectors];
  group.template Sums<kRows>(x, sums);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++) {
    const uint8_t* factors = x + r * Group::kRecord + Group::kBytes;
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; i++) {
      y[r][i] = Lanes::Fma(sums[r][i], Lanes::Times(scale[i], Lanes::All(factors)), y[r][i]);
      if (kAffine) y[r][i] = Lanes::Fma(offset[i], Lanes::All(factors + 4), y[r][i]);
    }
  }
}

template <class Group, bool kAffine, int kRows, int kVectors>
HEADRACE_INLINE void AddRows(const Group& group, const Lanes::Floats (&scale)[kVectors],
                             const Lanes::Floats (&offset)[kVectors], const uint8_t* x, float* sums, int stride) {
  Lanes::Floats y[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; i++) y[r][i] = Lanes::Load(sums + r * stride + i * Lanes::kWidth);
  AddGroup<Group, kAffine, kRows, kVectors>(group, scale, offset, x, y);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; i++) Lanes::Store(sums + r * stride + i * Lanes::kWidth, y[r][i]);
}

// Scales and offsets of kVectors vectors: of as many tiles, or of one part of one tile.
template <bool kAffine, int kVectors>
HEADRACE_INLINE void LoadFactors(const Blocks& w, const uint8_t* block, int part, Lanes::Floats (&scale)[kVectors],
                                 Lanes::Floats (&offset)[kVectors]) {
  const ptrdiff_t bytes = ptrdiff_t(w.form.ScaleBytes()), first = ptrdiff_t(w.form.ValueBytes());
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; i++) {
    const uint8_t* at = block + i * w.tile_bytes + first + part * (bytes * Lanes::kWidth / kTile);
    scale[i] = Lanes::Factors(at, w.form.wide);
    offset[i] = kAffine ? Lanes::Factors(at + bytes, w.form.wide) : Lanes::Zero();
  }
}

// kTiles tiles and all rows, their sums in memory.
template <int kBits, int kGroup, bool kAffine, bool kInt16, int kTiles>
__attribute__((noinline)) void ManyRows(const Blocks& w, const Records& x, int rows, float* out, ptrdiff_t stride) {
  constexpr int kParts = kTile / Lanes::kWidth, kVectors = kTiles;
  static_assert(kParts == 1 || kTiles == 1);
  constexpr int kColumns = kTiles * kTile, kRows = Lanes::Rows(kInt16);
  using Group = Lanes::Group<kBits, kGroup, kInt16, kVectors>;
  const int block_bytes = int(w.form.BlockBytes());
  const int64_t ahead = w.groups < kAhead / block_bytes ? w.groups : kAhead / block_bytes;
  alignas(64) float sums[kRowsAtOnce * kColumns];
  std::memset(sums, 0, sizeof(float) * kColumns * rows);
  for (int64_t g = 0; g < w.groups; g++) {
    const uint8_t *block = w.first + g * ptrdiff_t(block_bytes), *records = x.first + g * x.group_bytes;
    if (rows <= kRowsWithFetch)
      Fetch<kTiles>(w, g, ahead, block_bytes);
    for (int part = 0; part < kParts; part++) {
      const Group group(block, w.tile_bytes, part);
      Lanes::Floats scale[kVectors], offset[kVectors];
      LoadFactors<kAffine, kVectors>(w, block, part, scale, offset);
      float* at = sums + part * Lanes::kWidth;
      int r = 0;
      for (; r + kRows <= rows; r += kRows)
        AddRows<Group, kAffine, kRows, kVectors>(group, scale, offset, records + r * Group::kRecord, at + r * kColumns,
                                                 kColumns);
      if (kRows > 2 && r + 2 <= rows) {
        AddRows<Group, kAffine, 2, kVectors>(group, scale, offset, records + r * Group::kRecord, at + r * kColumns,
                                             kColumns);
        r += 2;
      }
      if (kRows > 1 && r < rows)
        AddRows<Group, kAffine, 1, kVectors>(group, scale, offset, records + r * Group::kRecord, at + r * kColumns,
                                             kColumns);
    }
  }
  for (int r = 0; r < rows; r++) std::memcpy(out + r * stride, sums + r * kColumns, sizeof(float) * kColumns);
}

// One tile and one or two rows, their sums in registers: 6 to 15 % over sums in memory.
template <int kBits, int kGroup, bool kAffine, bool kInt16, int kRows>
__attribute__((noinline)) void FewRows(const Blocks& w, const Records& x, float* out, ptrdiff_t stride) {
  constexpr int kParts = kTile / Lanes::kWidth;
  using Group = Lanes::Group<kBits, kGroup, kInt16, 1>;
  const int block_bytes = int(w.form.BlockBytes());
  const int64_t ahead = w.groups < kAhead / block_bytes ? w.groups : kAhead / block_bytes;
  Lanes::Floats y[kParts][kRows][1];
#pragma GCC unroll 2
  for (int part = 0; part < kParts; part++)
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r++) y[part][r][0] = Lanes::Zero();
  for (int64_t g = 0; g < w.groups; g++) {
    const uint8_t *block = w.first + g * ptrdiff_t(block_bytes), *records = x.first + g * x.group_bytes;
    Fetch<1>(w, g, ahead, block_bytes);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; part++) {
      const Group group(block, w.tile_bytes, part);
      Lanes::Floats scale[1], offset[1];
      LoadFactors<kAffine, 1>(w, block, part, scale, offset);
      AddGroup<Group, kAffine, kRows, 1>(group, scale, offset, records, y[part]);
    }
  }
#pragma GCC unroll 2
  for (int part = 0; part < kParts; part++)
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r++) Lanes::Store(out + r * stride + part * Lanes::kWidth, y[part][r][0]);
}

template <int kBits, int kGroup, bool kAffine, bool kInt16>
void Tiles(const uint8_t* tiles, const Form& form, int64_t groups, const uint8_t* records, int64_t rows,
           int64_t num_tiles, float* out, int64_t ld) {
  constexpr int64_t kRecord = RecordSize(kGroup, kInt16);
  const int64_t tile_bytes = groups * int64_t(form.BlockBytes());
  for (int64_t tile = 0; tile < num_tiles;) {
    const Blocks w{tiles + tile * tile_bytes, tile_bytes, groups, form};
    float* y = out + tile * kTile;
    if (rows <= 2) {
      const auto few = rows == 1 ? FewRows<kBits, kGroup, kAffine, kInt16, 1>
                                 : FewRows<kBits, kGroup, kAffine, kInt16, 2>;
      few(w, {records, rows * kRecord}, y, ld);
      tile++;
      continue;
    }
    const bool together = num_tiles - tile >= Lanes::kVectors;
    const auto many = together ? ManyRows<kBits, kGroup, kAffine, kInt16, Lanes::kVectors>
                               : ManyRows<kBits, kGroup, kAffine, kInt16, 1>;
    for (int64_t r = 0; r < rows; r += kRowsAtOnce)
      many(w, {records + r * kRecord, rows * kRecord}, int(rows - r < kRowsAtOnce ? rows - r : kRowsAtOnce), y + r * ld, ld);
    tile += together ? Lanes::kVectors : 1;
  }
}

template <bool kInt16>
auto TilesOf(const Form& form) -> decltype(&Tiles<4, 32, true, kInt16>) {
  if (form.bits == 4 && form.group == 32) return form.affine ? Tiles<4, 32, true, kInt16> : Tiles<4, 32, false, kInt16>;
  if (form.bits == 4) return form.affine ? Tiles<4, 16, true, kInt16> : Tiles<4, 16, false, kInt16>;
  if (form.group == 32) return form.affine ? Tiles<8, 32, true, kInt16> : Tiles<8, 32, false, kInt16>;
  return form.affine ? Tiles<8, 16, true, kInt16> : Tiles<8, 16, false, kInt16>;
}

}  // namespace headrace::quant::HEADRACE_ISA
