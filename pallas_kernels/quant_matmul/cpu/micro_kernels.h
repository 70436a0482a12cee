// The kernels behind products with tiled weights: one table for each instruction set.
//
// A tile is 16 columns, a stream of blocks, one for each group of 16 or 32 values along K (tiles.py writes them).
// A block of group g, bytes in this order:
//   4 bit: g/8 vectors of 64 bytes; vector v, column o, byte b at 64v + 4o + b:
//          low nibble u[4v + b][o], high nibble u[g/2 + 4v + b][o]
//   8 bit: g/4 vectors of 64 bytes; 64v + 4o + b: u[4v + b][o]
//   then 16 scales (float16 or float32), then, if affine, 16 offsets of the same type.
// u is unsigned. A weight is scale * (u - zero) + offset.
#pragma once
#include <cstddef>
#include <cstdint>

#include "native/cpu_features.h"

namespace headrace::quant {

constexpr int kTile = 16;

// Of activations: float32, or integers with one factor for each row and group.
enum class Mode : int32_t { kExact = 0, kInt16 = 1, kInt8 = 2 };

struct Form {
  int bits;     // 4 or 8
  int group;    // 16 or 32 values along K
  int zero;     // 0..128
  bool affine;  // there are offsets
  bool wide;    // scales and offsets are float32
  size_t ValueBytes() const { return size_t(group) * kTile * bits / 8; }
  size_t ScaleBytes() const { return size_t(kTile) * (wide ? 4 : 2); }
  size_t BlockBytes() const { return ValueBytes() + ScaleBytes() * (affine ? 2 : 1); }
};

// Of a row of values: the largest, where it is first, and whether all are finite. Where there is NaN, some value.
struct Best {
  float value;
  int64_t index;
  bool finite;
};

struct MicroKernels {
  // Integer activations: records [groups][rows][RecordBytes], private to the kernels of one table.
  size_t (*record_bytes)(Mode mode, int group);
  // Row x [groups * group] becomes row `row` of `rows` rows of records (64-byte aligned).
  void (*pack_row)(const float* x, int64_t groups, int group, Mode mode, int zero, int64_t rows, int64_t row,
                   uint8_t* records);
  // out[r * ld + 16 * t + o] for all rows and num_tiles tiles. What a row gives does not depend on rows or num_tiles.
  void (*product)(const uint8_t* tiles, const Form& form, int64_t groups, Mode mode, const uint8_t* records,
                  int64_t rows, int64_t num_tiles, float* out, int64_t ld);
  // As product, with float32 activations x [rows][ldx].
  void (*exact)(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx, int64_t rows,
                int64_t num_tiles, float* out, int64_t ld);
  // out[k] = x[k] / sqrt(mean(x^2) + eps) * scale[k]
  void (*rms)(const float* x, const float* scale, float eps, int64_t k, float* out);
  // out[k] = gate[k] / (1 + exp(-gate[k])) * value[k]
  void (*gated)(const float* gate, const float* value, int64_t k, float* out);
  // n >= 1
  Best (*best)(const float* y, int64_t n);
};

}  // namespace headrace::quant

HEADRACE_DECLARE(headrace::quant::MicroKernels, GetQuantKernels)
