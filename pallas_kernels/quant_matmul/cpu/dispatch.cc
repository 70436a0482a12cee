// Which instruction set's kernels run on this machine.
#include <cstring>
#include <initializer_list>

#include "quant_matmul/cpu/isa_kernels.h"

namespace headrace::quant {
namespace {

#define HEADRACE_TABLE(isa) \
  {isa::RecordBytes, isa::PackRow, isa::Product, isa::Exact, isa::Rms, isa::Gated, isa::BestOf}

#if defined(__x86_64__)
const MicroKernels kAvx2 = HEADRACE_TABLE(avx2);
const MicroKernels kAvx512 = HEADRACE_TABLE(avx512);

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
const MicroKernels kNeon = HEADRACE_TABLE(neon);
#endif

}  // namespace

const MicroKernels* BestKernels() {
  for (const char* name : {"avx512", "avx2", "neon"})
    if (const MicroKernels* kernels = KernelsNamed(name)) return kernels;
  return nullptr;
}

const MicroKernels* KernelsNamed(const char* name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx512") && HasAvx512()) return &kAvx512;
  if (!std::strcmp(name, "avx2") && HasAvx2()) return &kAvx2;
#elif defined(__aarch64__)
  if (!std::strcmp(name, "neon")) return &kNeon;
#endif
  return nullptr;
}

}  // namespace headrace::quant
