// Which of the compiled instruction sets run: chosen once at load, from what this CPU and its system can do.
//
// For the author of an operation:
//  * op.isa.cc is compiled once for each instruction set, with HEADRACE_ISA its name (avx2, avx512 or neon) and one of
//    HEADRACE_ISA_AVX2, HEADRACE_ISA_AVX512, HEADRACE_ISA_NEON 1. All that it defines is in namespace
//    headrace::HEADRACE_ISA, down to the smallest inline function; out of it goes one getter of a table of plain
//    functions:
//        const OpTable& GetOpTable() { static constexpr OpTable table{...}; return table; }
//    No code of the standard library that is not inlined for certain (containers, iostreams, std::sort): the linker
//    keeps one copy of such a function for the whole library, perhaps the one with AVX-512 in it.
//    tests/pallas_kernels/native/test_library.py looks for such copies.
//  * op.cc, compiled once for the base architecture, has the handler, and asks for the table at each call:
//        HEADRACE_DECLARE(OpTable, GetOpTable)                      // at global scope
//        const OpTable* table = HEADRACE_CHOSEN(GetOpTable);        // null: this CPU has none; return an error
//  AVX-512 means F, BW, DQ, VL and VNNI together; AVX2 means AVX2, FMA and F16C; NEON means dotprod and fp16.
#pragma once

#define HEADRACE_DECLARE_AVX2(type, getter)
#define HEADRACE_DECLARE_AVX512(type, getter)
#define HEADRACE_DECLARE_NEON(type, getter)
#define HEADRACE_CHOSEN_AVX2(getter)
#define HEADRACE_CHOSEN_AVX512(getter)
#define HEADRACE_CHOSEN_NEON(getter)

#ifdef HEADRACE_HAS_AVX2
#undef HEADRACE_DECLARE_AVX2
#undef HEADRACE_CHOSEN_AVX2
#define HEADRACE_DECLARE_AVX2(type, getter) \
  namespace headrace::avx2 {                \
  const type& getter();                     \
  }
#define HEADRACE_CHOSEN_AVX2(getter) ::headrace::ChosenIsa() == ::headrace::Isa::kAvx2 ? &::headrace::avx2::getter() :
#endif
#ifdef HEADRACE_HAS_AVX512
#undef HEADRACE_DECLARE_AVX512
#undef HEADRACE_CHOSEN_AVX512
#define HEADRACE_DECLARE_AVX512(type, getter) \
  namespace headrace::avx512 {                \
  const type& getter();                       \
  }
#define HEADRACE_CHOSEN_AVX512(getter) \
  ::headrace::ChosenIsa() == ::headrace::Isa::kAvx512 ? &::headrace::avx512::getter() :
#endif
#ifdef HEADRACE_HAS_NEON
#undef HEADRACE_DECLARE_NEON
#undef HEADRACE_CHOSEN_NEON
#define HEADRACE_DECLARE_NEON(type, getter) \
  namespace headrace::neon {                \
  const type& getter();                     \
  }
#define HEADRACE_CHOSEN_NEON(getter) ::headrace::ChosenIsa() == ::headrace::Isa::kNeon ? &::headrace::neon::getter() :
#endif

#define HEADRACE_DECLARE(type, getter)  \
  HEADRACE_DECLARE_AVX2(type, getter)   \
  HEADRACE_DECLARE_AVX512(type, getter) \
  HEADRACE_DECLARE_NEON(type, getter)
#define HEADRACE_CHOSEN(getter) \
  (HEADRACE_CHOSEN_AVX512(getter) HEADRACE_CHOSEN_AVX2(getter) HEADRACE_CHOSEN_NEON(getter) nullptr)

namespace headrace {

enum class Isa : int { kNone = 0, kNeon = 1, kAvx2 = 2, kAvx512 = 3 };

// The best that is compiled and that this machine runs, or a lower one that HeadraceUseIsa has set.
Isa ChosenIsa();

}  // namespace headrace

extern "C" {
// Name of ChosenIsa: "avx512", "avx2", "neon" or "none".
const char* HeadraceIsa();
// Choose by name, also while handlers run. 0: done; 1: not compiled in; 2: this machine cannot run it.
int HeadraceUseIsa(const char* name);
}
