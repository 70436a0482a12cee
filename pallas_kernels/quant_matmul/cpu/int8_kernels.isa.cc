// Products of int8 activations with group-quantized weights, for one instruction set (integer_kernels.h).
#include "quant_matmul/cpu/integer_product.h"

namespace headrace::quant::HEADRACE_ISA {

void ProductInt8(const uint8_t* tiles, const Form& form, int64_t groups, const uint8_t* records, int64_t rows,
                 int64_t num_tiles, float* out, int64_t ld) {
  TilesOf<false>(form)(tiles, form, groups, records, rows, num_tiles, out, ld);
}

}  // namespace headrace::quant::HEADRACE_ISA
