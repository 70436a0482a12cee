// What this CPU and its operating system can run.
#include "native/cpu_features.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace headrace {
namespace {

struct Entry {
  Isa isa;
  const char* name;
};

// Compiled ones, the best first.
constexpr Entry kCompiled[] = {
#ifdef HEADRACE_HAS_AVX512
    {Isa::kAvx512, "avx512"},
#endif
#ifdef HEADRACE_HAS_AVX2
    {Isa::kAvx2, "avx2"},
#endif
#ifdef HEADRACE_HAS_NEON
    {Isa::kNeon, "neon"},
#endif
    {Isa::kNone, "none"},
};

std::atomic<int> chosen{-1};  // -1: not asked yet

bool Runs(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();  // its answers include whether the system saves the registers
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  const bool has_avx2 = has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx2) return has_avx2;
  if (isa == Isa::kAvx512) {
    return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  }
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kHalfFloats = 1ul << 10, kDotProducts = 1ul << 20;  // HWCAP_ASIMDHP, HWCAP_ASIMDDP
  const unsigned long has = getauxval(AT_HWCAP);
  if (isa == Isa::kNeon) return (has & kHalfFloats) != 0 && (has & kDotProducts) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (isa == Isa::kNeon) return true;
#endif
  return isa == Isa::kNone;
}

}  // namespace

Isa ChosenIsa() {
  int now = chosen.load(std::memory_order_relaxed);
  if (now < 0) {
    for (const Entry& entry : kCompiled) {
      if (Runs(entry.isa)) {
        chosen.compare_exchange_strong(now, static_cast<int>(entry.isa));  // unless somebody has chosen meanwhile
        break;
      }
    }
    now = chosen.load();
  }
  return static_cast<Isa>(now);
}

}  // namespace headrace

extern "C" {

__attribute__((visibility("default"))) const char* HeadraceIsa() {
  for (const headrace::Entry& entry : headrace::kCompiled) {
    if (entry.isa == headrace::ChosenIsa()) return entry.name;
  }
  return "none";
}

__attribute__((visibility("default"))) int HeadraceUseIsa(const char* name) {
  for (const headrace::Entry& entry : headrace::kCompiled) {
    if (std::strcmp(entry.name, name) != 0) continue;
    if (!headrace::Runs(entry.isa)) return 2;
    headrace::chosen.store(static_cast<int>(entry.isa));
    return 0;
  }
  return 1;
}
}
