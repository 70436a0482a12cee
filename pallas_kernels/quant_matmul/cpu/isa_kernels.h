// What the *.isa.cc files define for the table of their instruction set, besides the integer kernels
// (micro_kernels.h says what each does).
#pragma once
#include "quant_matmul/cpu/integer_kernels.h"

namespace headrace::quant::HEADRACE_ISA {

void Exact(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx, int64_t rows,
           int64_t num_tiles, float* out, int64_t ld);
void Rms(const float* x, const float* scale, float eps, int64_t k, float* out);
void Gated(const float* gate, const float* value, int64_t k, float* out);
Best BestOf(const float* y, int64_t n);

}  // namespace headrace::quant::HEADRACE_ISA
