// What the *.isa.cc files define for the table of their instruction set (micro_kernels.h says what each does).
#pragma once
#include "quant_matmul/cpu/micro_kernels.h"

namespace headrace::quant::HEADRACE_ISA {

size_t RecordBytes(Mode mode, int group);
void PackRow(const float* x, int64_t groups, int group, Mode mode, int zero, int64_t rows, int64_t row,
             uint8_t* records);
void Product(const uint8_t* tiles, const Form& form, int64_t groups, Mode mode, const uint8_t* records, int64_t rows,
             int64_t num_tiles, float* out, int64_t ld);
void Exact(const uint8_t* tiles, const Form& form, int64_t groups, const float* x, int64_t ldx, int64_t rows,
           int64_t num_tiles, float* out, int64_t ld);
void Rms(const float* x, const float* scale, float eps, int64_t k, float* out);
void Gated(const float* gate, const float* value, int64_t k, float* out);
Best BestOf(const float* y, int64_t n);

}  // namespace headrace::quant::HEADRACE_ISA
