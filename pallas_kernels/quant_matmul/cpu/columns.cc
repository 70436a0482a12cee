// Columns of a tiled weight as float32, bit for bit what scale * value + offset gives.
#include <cstring>

#include "quant_matmul/cpu/products.h"

namespace headrace::quant {
namespace {

float FromHalf(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) {
    bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {  // subnormal: magnitude * 2^-24
    const float small = float(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float Factor(const uint8_t* factors, int column, bool wide) {
  if (!wide) {
    uint16_t half;
    std::memcpy(&half, factors + 2 * column, 2);
    return FromHalf(half);
  }
  float value;
  std::memcpy(&value, factors + 4 * column, 4);
  return value;
}

}  // namespace

bool Columns(const Weight& weight, int64_t k, const int32_t* index, int64_t count, float* out) {
  const Form& form = weight.form;
  const int64_t groups = weight.Groups(k), block_bytes = form.BlockBytes();
  const int half = form.group / 2;
  bool is_valid = true;
  for (int64_t i = 0; i < count; i++, out += k) {
    if (index[i] < 0 || index[i] >= weight.columns) {
      is_valid = false;
      std::memset(out, 0, size_t(k) * 4);
      continue;
    }
    const int column = index[i] % kTile;
    const uint8_t* block = weight.tiles + index[i] / kTile * groups * block_bytes;
    for (int64_t k0 = 0; k0 < k; k0 += form.group, block += block_bytes) {
      const uint8_t* factors = block + form.ValueBytes();
      const float scale = Factor(factors, column, form.wide);
      const int64_t rows = k - k0 < form.group ? k - k0 : form.group;
      for (int64_t j = 0; j < rows; j++) {
        const int64_t row = form.bits == 4 ? j % half : j;
        const int byte = block[64 * (row / 4) + 4 * column + row % 4];
        const int u = form.bits == 8 ? byte : j < half ? byte & 15 : byte >> 4;
        out[k0 + j] = scale * float(u - form.zero);
      }
      if (!form.affine) continue;
      const float offset = Factor(factors + form.ScaleBytes(), column, form.wide);
      for (int64_t j = 0; j < rows; j++) out[k0 + j] += offset;
    }
  }
  return is_valid;
}

}  // namespace headrace::quant
