// Pins a value in a vector register at this point: GCC 12 otherwise hoists products before the first addition and
// spills them, at half the rate. Only for *.isa.cc.
#pragma once

#if defined(HEADRACE_ISA_AVX512)
#define HEADRACE_KEEP(value) asm volatile("" : "+v"(value))
#elif defined(HEADRACE_ISA_NEON)
#define HEADRACE_KEEP(value) asm volatile("" : "+w"(value))
#else
#define HEADRACE_KEEP(value) asm volatile("" : "+x"(value))
#endif
