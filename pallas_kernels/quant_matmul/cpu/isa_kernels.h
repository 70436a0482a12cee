// What the *.isa.cc files define, once in the namespace of each instruction set.
//
// Nothing there may instantiate templates or inline functions of the standard library: the linker keeps one copy of
// each, and code for AVX-512 would then run on machines without it.
#pragma once
#include "quant_matmul/cpu/micro_kernels.h"

#define HEADRACE_DECLARE_KERNELS(isa)                                                                                  \
  namespace isa {                                                                                                      \
  size_t RecordBytes(Mode mode, int group);                                                                            \
  void PackRow(const float* x, int64_t groups, int group, Mode mode, int zero, int64_t rows, int64_t row,              \
               uint8_t* records);                                                                                      \
  void Product(const uint8_t* tiles, const Form& form, int64_t groups, Mode mode, const uint8_t* records,              \
               int64_t rows, int64_t num_tiles, float* out, int64_t ld);                                               \
  void Exact(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx, int64_t rows,        \
             int64_t num_tiles, float* out, int64_t ld);                                                               \
  void Rms(const float* x, const float* scale, float eps, int64_t k, float* out);                                      \
  void Gated(const float* gate, const float* value, int64_t k, float* out);                                            \
  Best BestOf(const float* y, int64_t n);                                                                              \
  }

namespace headrace::quant {
HEADRACE_DECLARE_KERNELS(avx2)
HEADRACE_DECLARE_KERNELS(avx512)
HEADRACE_DECLARE_KERNELS(neon)
}  // namespace headrace::quant
