// The table of one instruction set.
#include "quant_matmul/cpu/isa_kernels.h"

namespace headrace::HEADRACE_ISA {

const quant::MicroKernels& GetQuantKernels() {
  using namespace quant::HEADRACE_ISA;
  static constexpr quant::MicroKernels table{RecordBytes, PackRow, Product, Exact, Rms, Gated, BestOf};
  return table;
}

}  // namespace headrace::HEADRACE_ISA
