// The vector operations of attention and the draw, once for each instruction set; every lane computes the same bits.
// Only for *.isa.cc: everything has internal linkage, so that no linker merges code of two instruction sets.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own _mm512_undefined_ps
#endif
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace {

#if defined(HEADRACE_ISA_AVX512)
using Vec = __m512;
constexpr int kLanes = 16, kColumns = 4;  // kColumns vectors times kRows rows of sums stay in registers
inline Vec Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec Set1(float x) { return _mm512_set1_ps(x); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec Nfma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec Div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where one is NaN
inline Vec WhereLess(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline Vec RoundAndPower(Vec x, Vec* power) {
  const __m512i n = _mm512_cvtps_epi32(x);
  *power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
  return _mm512_cvtepi32_ps(n);
}
inline float Largest(Vec v) { return _mm512_reduce_max_ps(v); }
#elif defined(HEADRACE_ISA_AVX2)
using Vec = __m256;
constexpr int kLanes = 8, kColumns = 2;
inline Vec Load(const float* p) { return _mm256_loadu_ps(p); }
inline void Store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec Set1(float x) { return _mm256_set1_ps(x); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec Nfma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec Mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec Sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec Div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec Max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec WhereLess(Vec a, Vec b, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Vec RoundAndPower(Vec x, Vec* power) {
  const __m256i n = _mm256_cvtps_epi32(x);
  *power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  return _mm256_cvtepi32_ps(n);
}
inline float Largest(Vec v) {
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
#else
using Vec = float32x4_t;
constexpr int kLanes = 4, kColumns = 4;
inline Vec Load(const float* p) { return vld1q_f32(p); }
inline void Store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec Set1(float x) { return vdupq_n_f32(x); }
inline Vec Fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec Nfma(Vec a, Vec b, Vec c) { return vfmsq_f32(c, a, b); }
inline Vec Mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec Add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec Sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec Div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec Max(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline Vec WhereLess(Vec a, Vec b, Vec yes, Vec no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
inline Vec RoundAndPower(Vec x, Vec* power) {
  const int32x4_t n = vcvtnq_s32_f32(x);
  *power = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
  return vcvtq_f32_s32(n);
}
inline float Largest(Vec v) { return vmaxvq_f32(v); }
#endif

constexpr int kRows = 6;

// e^x to 2e-7; exactly 0 below -87.3, exactly 1 at 0, NaN of NaN. For x <= 0.
inline Vec Exp(Vec x) {
  const Vec least = Set1(-87.3f);
  const Vec y = Max(least, x);
  Vec power;
  const Vec n = RoundAndPower(Mul(y, Set1(1.44269504f)), &power);
  Vec f = Nfma(n, Set1(0.693359375f), y);
  f = Nfma(n, Set1(-2.12194440e-4f), f);
  Vec p = Set1(1.f / 5040);
  constexpr float kMore[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f};
  for (float c : kMore) p = Fma(p, f, Set1(c));
  return WhereLess(x, least, Set1(0), Mul(p, power));
}

// cap * tanh(x / cap), from 1 - 2 / (e^(2 |x| / cap) + 1) with the exponential of a negative number.
inline Vec Capped(Vec x, float cap) {
  const Vec zero = Set1(0), y = Div(x, Set1(cap));
  const Vec size = WhereLess(y, zero, Sub(zero, y), y);
  const Vec e = Exp(Mul(Set1(-2), size));
  const Vec t = Mul(Set1(cap), Div(Sub(Set1(1), e), Add(Set1(1), e)));
  return WhereLess(y, zero, Sub(zero, t), t);
}

// Sum of 64 values: 16 sums of every 16th, then halves upon halves.
inline float Sum64(const float* p) {
  constexpr int kParts = 16 / kLanes;
  Vec part[kParts];
  for (int i = 0; i < kParts; i++) part[i] = Load(p + i * kLanes);
  for (int j = 16; j < 64; j += 16)
    for (int i = 0; i < kParts; i++) part[i] = Add(part[i], Load(p + j + i * kLanes));
  float lane[16];
  for (int i = 0; i < kParts; i++) Store(lane + i * kLanes, part[i]);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

// Eight stored values as float32 at out.
#if defined(__x86_64__)
inline __m256 Load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 Load8(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m256 Load8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
template <class T>
inline void Widen8(const T* p, float* out) { _mm256_storeu_ps(out, Load8(p)); }

// 8 values of 8 keys that are stride apart, to out[value * kBlock + key].
template <class T>
inline void Transpose8(const T* p, int stride, float* out, int out_stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = Load8(p + i * stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
#else
inline void Widen8(const float* p, float* out) { std::memcpy(out, p, 32); }
inline void Widen8(const uint16_t* p, float* out) {
  const uint16x8_t bits = vld1q_u16(p);
  vst1q_f32(out, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)));
  vst1q_f32(out + 4, vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16)));
}
inline void Widen8(const int8_t* p, float* out) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  vst1q_f32(out, vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))));
  vst1q_f32(out + 4, vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide))));
}
template <class T>
inline void Transpose8(const T* p, int stride, float* out, int out_stride) {
  float row[8];
  for (int i = 0; i < 8; i++) {
    Widen8(p + i * stride, row);
    for (int j = 0; j < 8; j++) out[j * out_stride + i] = row[j];
  }
}
#endif

}  // namespace
