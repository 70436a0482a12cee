// The loops of an integer product, over tiles, groups and rows, for all instruction sets (integer_kernels.h).
//
// A group's values are prepared once and meet all rows (64 at a time), whose sums wait in the L1 cache; one or two
// rows keep their sums in registers. So any number of rows reads the weights once from memory, unpacked once.
#pragma once
#include "quant_matmul/cpu/integer_lanes.h"

namespace headrace::quant::HEADRACE_ISA {

constexpr int kRowsAtOnce = 64;  // their sums: 8 KiB

// Few rows wait for memory, and 32 rows of int8 weights still do: fetch this far ahead in the stream of blocks. 1
// thread, 30 cold int4 weights 576 x 3072, three runs each: 1 row 152 GFLOP/s with 4096 bytes, 161 to 174 with 8192
// (the streaming read is 200); 4 rows 490 to 524 and 581 to 594.
constexpr int kAhead = 8192;

struct Blocks {
  const uint8_t* first;
  ptrdiff_t tile_bytes;
  int64_t groups;
  Form form;
  ptrdiff_t block_bytes;
  ptrdiff_t ahead;  // kAhead in whole blocks, no more than a tile
};

struct Records {
  const uint8_t* first;
  ptrdiff_t group_bytes;
};

// What the loop over groups of kTiles tiles reads kAhead bytes after byte `at` of each: these tiles, then those behind.
template <int kBits, int kGroup, int kTiles>
HEADRACE_INLINE void Fetch(const Blocks& w, ptrdiff_t at) {
  constexpr int kLines = 2 * kBits * kGroup / 64 + 1;
  at += w.ahead;
  if (at >= w.tile_bytes) at += (kTiles - 1) * w.tile_bytes;
#pragma GCC unroll 2
  for (int i = 0; i < kTiles; i++) {
    const uint8_t* block = w.first + i * w.tile_bytes + at;
#pragma GCC unroll 9
    for (int line = 0; line < kLines; line++) __builtin_prefetch(block + 64 * line);
    if (w.form.wide) __builtin_prefetch(block + 64 * kLines);
  }
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
  alignas(64) float sums[kRowsAtOnce * kColumns];
  std::memset(sums, 0, sizeof(float) * kColumns * rows);
  for (int64_t g = 0; g < w.groups; g++) {
    const uint8_t *block = w.first + g * w.block_bytes, *records = x.first + g * x.group_bytes;
    Fetch<kBits, kGroup, kTiles>(w, g * w.block_bytes);
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
  Lanes::Floats y[kParts][kRows][1];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; part++)
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r++) y[part][r][0] = Lanes::Zero();
  for (int64_t g = 0; g < w.groups; g++) {
    const uint8_t *block = w.first + g * w.block_bytes, *records = x.first + g * x.group_bytes;
    Fetch<kBits, kGroup, 1>(w, g * w.block_bytes);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; part++) {
      asm volatile("" : "+r"(records));  // or GCC keeps activations of the first part for the next, on the stack
      const Group group(block, w.tile_bytes, part);
      Lanes::Floats scale[1], offset[1];
      LoadFactors<kAffine, 1>(w, block, part, scale, offset);
      AddGroup<Group, kAffine, kRows, 1>(group, scale, offset, records, y[part]);
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < kParts; part++)
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r++) Lanes::Store(out + r * stride + part * Lanes::kWidth, y[part][r][0]);
}

template <int kBits, int kGroup, bool kAffine, bool kInt16>
void Tiles(const uint8_t* tiles, const Form& form, int64_t groups, const uint8_t* records, int64_t rows,
           int64_t num_tiles, float* out, int64_t ld) {
  constexpr int64_t kRecord = RecordSize(kGroup, kInt16);
  const ptrdiff_t block_bytes = ptrdiff_t(form.BlockBytes()), tile_bytes = groups * block_bytes;
  const ptrdiff_t ahead = (groups < kAhead / block_bytes ? groups : kAhead / block_bytes) * block_bytes;
  for (int64_t tile = 0; tile < num_tiles;) {
    const Blocks w{tiles + tile * tile_bytes, tile_bytes, groups, form, block_bytes, ahead};
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
      many(w, {records + r * kRecord, rows * kRecord}, int(rows - r < kRowsAtOnce ? rows - r : kRowsAtOnce),
           y + r * ld, ld);
    tile += together ? Lanes::kVectors : 1;
  }
}

template <bool kInt16>
auto TilesOf(const Form& form) -> decltype(&Tiles<4, 32, true, kInt16>) {
  if (form.bits == 4 && form.group == 32)
    return form.affine ? Tiles<4, 32, true, kInt16> : Tiles<4, 32, false, kInt16>;
  if (form.bits == 4) return form.affine ? Tiles<4, 16, true, kInt16> : Tiles<4, 16, false, kInt16>;
  if (form.group == 32) return form.affine ? Tiles<8, 32, true, kInt16> : Tiles<8, 32, false, kInt16>;
  return form.affine ? Tiles<8, 16, true, kInt16> : Tiles<8, 16, false, kInt16>;
}

}  // namespace headrace::quant::HEADRACE_ISA
