// Products of integer activations with group-quantized weights, for one instruction set; blocks: micro_kernels.h.
//
// Activations become records, one of each group and row: group bytes (int8) or 2 group bytes (int16) whose order is
// the instruction set's own, then float scale, float scale * sum(q), int32 -zero * sum(q), int32 sum(q). x is about
// scale * q.
//
// A 32-bit lane is one column: neither a horizontal sum nor a shuffle of weights is ever needed. Every variant does
// the same float operations in the same order for a row and a column, so that a product has the same bits for any
// number of rows, any split of the tiles, and any instruction set:
//   y = 0; for each group, ascending: y = fma(float(sum of q * (u - zero)), scale_w * scale, y); if affine:
//   y = fma(offset, scale * sum(q), y)
// where the sum is an exact int32: |q| <= 32639, 32 values and u up to 255 stay below 2^29.
#pragma once
#include "quant_matmul/cpu/micro_kernels.h"

namespace headrace::quant {

// Bytes of one record.
constexpr int RecordSize(int group, bool int16) { return (int16 ? 2 : 1) * group + 16; }

// The largest |q| of each kind. 32639 = 127 * 256 + 127: both its bytes fit an int8, the lower one rounded to nearest.
constexpr float kLargestInt8 = 127, kLargestInt16 = 32639;

namespace HEADRACE_ISA {

size_t RecordBytes(Mode mode, int group);

// scale = largest |x| of the group / largest q; q rounded to nearest even. Groups below 4e-34 everywhere count as 0; a
// NaN or an infinity gives a row without any finite value.
void PackRow(const float* x, int64_t groups, int group, Mode mode, int zero, int64_t rows, int64_t row,
             uint8_t* records);

// Tiles run in pairs: an even number is best. 128 rows at most keep the records in the L2 cache.
void Product(const uint8_t* tiles, const Form& form, int64_t groups, Mode mode, const uint8_t* records, int64_t rows,
             int64_t num_tiles, float* out, int64_t ld);

// Product of one mode; each is a file of its own, so that they compile side by side.
void ProductInt8(const uint8_t* tiles, const Form& form, int64_t groups, const uint8_t* records, int64_t rows,
                 int64_t num_tiles, float* out, int64_t ld);
void ProductInt16(const uint8_t* tiles, const Form& form, int64_t groups, const uint8_t* records, int64_t rows,
                  int64_t num_tiles, float* out, int64_t ld);

}  // namespace HEADRACE_ISA
}  // namespace headrace::quant
