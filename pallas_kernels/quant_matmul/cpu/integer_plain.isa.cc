// Integer activations in plain loops: for NEON, which has no kernels of its own yet.
#if defined(HEADRACE_ISA_NEON)
#include "quant_matmul/cpu/isa_kernels.h"

namespace headrace::quant::HEADRACE_ISA {

size_t RecordBytes(Mode, int group) { return 4 * size_t(group + 3); }

void PackRow(const float* x, int64_t groups, int group, Mode mode, int zero, int64_t rows, int64_t row,
             uint8_t* records) {
  const float limit = mode == Mode::kInt8 ? 127.f : 32639.f;
  for (int64_t g = 0; g < groups; g++, x += group) {
    int32_t* q = (int32_t*)(records + (g * rows + row) * RecordBytes(mode, group));
    float most = 0, nan = 0;
    for (int k = 0; k < group; k++) most = __builtin_fabsf(x[k]) > most ? __builtin_fabsf(x[k]) : most, nan += x[k] * 0;
    const float inverse = most > 0 && nan == 0 ? limit / most : 0;
    int32_t sum = 0;
    for (int k = 0; k < group; k++) sum += q[k] = int32_t(__builtin_rintf(x[k] * (nan == 0 ? inverse : 0)));
    if (nan != 0) sum = 0;
    const float s = most / limit + nan;
    ((float*)q)[group] = s;
    ((float*)q)[group + 1] = s * float(sum);
    q[group + 2] = -zero * sum;
  }
}

void Product(const uint8_t* tiles, const Form& form, int64_t groups, Mode mode, const uint8_t* records, int64_t rows,
             int64_t num_tiles, float* out, int64_t ld) {
  const int half = form.group / 2;
  const size_t record = RecordBytes(mode, form.group);
  for (int64_t t = 0; t < num_tiles; t++)
    for (int64_t r = 0; r < rows; r++) {
      float* y = out + r * ld + t * kTile;
      for (int o = 0; o < kTile; o++) y[o] = 0;
      for (int64_t g = 0; g < groups; g++) {
        const uint8_t* block = tiles + (t * groups + g) * form.BlockBytes();
        const int32_t* q = (const int32_t*)(records + (g * rows + r) * record);
        const float s = ((const float*)q)[form.group], shift = ((const float*)q)[form.group + 1];
        for (int o = 0; o < kTile; o++) {
          int32_t sum = q[form.group + 2];
          for (int k = 0; k < form.group; k++) {
            const int row = form.bits == 4 ? k % half : k;
            const uint8_t byte = block[64 * (row / 4) + 4 * o + row % 4];
            sum += q[k] * (form.bits == 8 ? byte : k < half ? byte & 15 : byte >> 4);
          }
          float factor[2] = {0, 0};
          for (int i = 0; i < 1 + form.affine; i++) {
            const uint8_t* p = block + form.ValueBytes() + i * form.ScaleBytes();
            if (form.wide)
              factor[i] = ((const float*)p)[o];
            else
              factor[i] = float(((const _Float16*)p)[o]);
          }
          y[o] = __builtin_fmaf(float(sum), factor[0] * s, y[o]);
          y[o] = __builtin_fmaf(factor[1], shift, y[o]);
        }
      }
    }
}

}  // namespace headrace::quant::HEADRACE_ISA
#endif
