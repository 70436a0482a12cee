// Vectors of float32 and of 32-bit lanes in the few operations that the portable kernels need.
// Only for *.isa.cc files: everything here belongs to one instruction set.
#pragma once
#include <cstdint>

#include "quant_matmul/cpu/keep.h"

// GCC 12 sees an uninitialized value in its own headers (_mm512_undefined_ps, fully masked out).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(HEADRACE_ISA_AVX2) || defined(HEADRACE_ISA_AVX512)
#include <immintrin.h>
#elif defined(HEADRACE_ISA_NEON)
#include <arm_neon.h>
#endif

namespace headrace::quant::HEADRACE_ISA {
namespace {

#if defined(HEADRACE_ISA_AVX512)

using F = __m512;
using I = __m512i;
constexpr int kLanes = 16;
inline F Zero() { return _mm512_setzero_ps(); }
inline F Set(float x) { return _mm512_set1_ps(x); }
inline F Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F LoadHalf(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F Add(F a, F b) { return _mm512_add_ps(a, b); }
inline F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F Div(F a, F b) { return _mm512_div_ps(a, b); }
inline F Max(F a, F b) { return _mm512_max_ps(a, b); }
inline F Min(F a, F b) { return _mm512_min_ps(a, b); }
inline F Round(F a) { return _mm512_roundscale_ps(a, 8); }
inline F PowerOfTwo(F whole) {
  const I biased = _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
inline I LoadBytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
// Bits shift .. shift + bits of each lane, as a float.
template <int kBits>
inline F Field(I p, int shift) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(p, shift), _mm512_set1_epi32((1 << kBits) - 1)));
}

#elif defined(HEADRACE_ISA_AVX2)

using F = __m256;
using I = __m256i;
constexpr int kLanes = 8;
inline F Zero() { return _mm256_setzero_ps(); }
inline F Set(float x) { return _mm256_set1_ps(x); }
inline F Load(const float* p) { return _mm256_loadu_ps(p); }
inline void Store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline F LoadHalf(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F Add(F a, F b) { return _mm256_add_ps(a, b); }
inline F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F Div(F a, F b) { return _mm256_div_ps(a, b); }
inline F Max(F a, F b) { return _mm256_max_ps(a, b); }
inline F Min(F a, F b) { return _mm256_min_ps(a, b); }
inline F Round(F a) { return _mm256_round_ps(a, 8); }
inline F PowerOfTwo(F whole) {
  const I biased = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline I LoadBytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
template <int kBits>
inline F Field(I p, int shift) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(p, shift), _mm256_set1_epi32((1 << kBits) - 1)));
}

#elif defined(HEADRACE_ISA_NEON)

using F = float32x4_t;
using I = uint32x4_t;
constexpr int kLanes = 4;
inline F Zero() { return vdupq_n_f32(0); }
inline F Set(float x) { return vdupq_n_f32(x); }
inline F Load(const float* p) { return vld1q_f32(p); }
inline void Store(float* p, F v) { vst1q_f32(p, v); }
inline F LoadHalf(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
inline F Fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F Add(F a, F b) { return vaddq_f32(a, b); }
inline F Mul(F a, F b) { return vmulq_f32(a, b); }
inline F Div(F a, F b) { return vdivq_f32(a, b); }
inline F Max(F a, F b) { return vmaxq_f32(a, b); }
inline F Min(F a, F b) { return vminq_f32(a, b); }
inline F Round(F a) { return vrndnq_f32(a); }
inline F PowerOfTwo(F whole) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23));
}
inline I LoadBytes(const uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
template <int kBits>
inline F Field(I p, int shift) {
  return vcvtq_f32_u32(vandq_u32(vshlq_u32(p, vdupq_n_s32(-shift)), vdupq_n_u32((1u << kBits) - 1)));
}

#endif

constexpr int kPerTile = 16 / kLanes;  // vectors across a tile

}  // namespace
}  // namespace headrace::quant::HEADRACE_ISA
