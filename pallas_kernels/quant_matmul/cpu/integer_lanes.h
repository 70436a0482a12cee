// Sums of integer products of one group, on the vectors of one instruction set.
//
// Lanes: Floats, a vector of kWidth columns, its operations, and Group<kBits, kGroup, kInt16, kVectors>: the values of
// kVectors vectors of columns in one group, whose Sums are the int32 sums with kRows records, as floats.
#pragma once
// GCC 12 takes _mm512_undefined_epi32 of its own header for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#if defined(HEADRACE_ISA_NEON)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstring>

#include "quant_matmul/cpu/integer_kernels.h"
#include "quant_matmul/cpu/keep.h"

#define HEADRACE_INLINE inline __attribute__((always_inline))

namespace headrace::quant::HEADRACE_ISA {

template <class T>
HEADRACE_INLINE T At(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

#if defined(HEADRACE_ISA_AVX512)

struct Lanes {
  using Floats = __m512;
  static constexpr int kWidth = 16;    // columns of a vector
  static constexpr int kVectors = 2;   // vectors that share the loads of activations: 16 of the 32 registers
  // Rows side by side: 2 chains of sums each in int8. int16 has twice the chains and is faster by one row (2 to 9 %).
  static constexpr int Rows(bool int16) { return int16 ? 1 : 2; }

  static HEADRACE_INLINE Floats Zero() { return _mm512_setzero_ps(); }
  static HEADRACE_INLINE Floats Load(const float* x) { return _mm512_loadu_ps(x); }
  static HEADRACE_INLINE void Store(float* x, Floats value) { _mm512_storeu_ps(x, value); }
  static HEADRACE_INLINE Floats All(const uint8_t* x) { return _mm512_set1_ps(At<float>(x)); }
  static HEADRACE_INLINE Floats Times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static HEADRACE_INLINE Floats Fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static HEADRACE_INLINE Floats Factors(const uint8_t* bytes, bool float32) {
    if (float32) return _mm512_loadu_ps(bytes);
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
  }

  // All values of the group unpacked in registers: one vpdpbusd for 4 values of 16 columns and a row. int16 is two
  // int8 halves, x = 256 high + low, on the same registers. Steps are template arguments, and
  // it is a local that is pinned: GCC 12 keeps the array in memory else (4 to 27 % at 3 to 16 rows).
  template <int kBits, int kGroup, bool kInt16, int kVectors>
  struct Group {
    static constexpr int kSteps = kGroup / 4, kRecord = RecordSize(kGroup, kInt16), kBytes = (kInt16 ? 2 : 1) * kGroup;
    __m512i values[kVectors][kSteps];

    // blocks: of kVectors tiles, tile_bytes apart.
    HEADRACE_INLINE Group(const uint8_t* blocks, ptrdiff_t tile_bytes, int) {
      Unpack<0, 0>(blocks);
      if constexpr (kVectors == 2) Unpack<1, 0>(blocks + tile_bytes);
    }

    template <int kVector, int kStep>
    HEADRACE_INLINE void Unpack(const uint8_t* block) {
      if constexpr (kStep < kSteps) {
        __m512i value = _mm512_loadu_si512(block + 64 * (kBits == 8 ? kStep : kStep % (kSteps / 2)));
        if constexpr (kBits == 4) {
          if (kStep >= kSteps / 2) value = _mm512_srli_epi16(value, 4);
          value = _mm512_and_si512(value, _mm512_set1_epi8(15));
        }
        HEADRACE_KEEP(value);
        values[kVector][kStep] = value;
        Unpack<kVector, kStep + 1>(block);
      }
    }

    template <int kStep, int kRows>
    HEADRACE_INLINE void Multiply(const uint8_t* x, __m512i (&sums)[kRows][kVectors]) const {
      if constexpr (kStep < kSteps) {
#pragma GCC unroll 2
        for (int r = 0; r < kRows; r++) {
          const __m512i four = _mm512_set1_epi32(At<int32_t>(x + r * kRecord + 4 * kStep));
          sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], values[0][kStep], four);
          HEADRACE_KEEP(sums[r][0]);
          if constexpr (kVectors == 2) {
            sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], values[1][kStep], four);
            HEADRACE_KEEP(sums[r][1]);
          }
        }
      }
    }

    template <int kStep, int kRows>
    HEADRACE_INLINE void Multiply(const uint8_t* x, __m512i (&low)[kRows][kVectors],
                                  __m512i (&high)[kRows][kVectors]) const {
      if constexpr (kStep < kSteps) {
        Multiply<kStep, kRows>(x, low);
        if constexpr (kInt16) Multiply<kStep, kRows>(x + kGroup, high);
        Multiply<kStep + 1, kRows>(x, low, high);
      }
    }

    template <int kRows>
    HEADRACE_INLINE void Sums(const uint8_t* x, Floats (&sums)[kRows][kVectors]) const {
      __m512i low[kRows][kVectors], high[kRows][kVectors];
#pragma GCC unroll 2
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; i++) {
          low[r][i] = _mm512_set1_epi32(At<int32_t>(x + r * kRecord + kBytes + 8));
          high[r][i] = _mm512_setzero_si512();
        }
      Multiply<0, kRows>(x, low, high);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; i++)
          sums[r][i] = _mm512_cvtepi32_ps(
              kInt16 ? _mm512_add_epi32(low[r][i], _mm512_slli_epi32(high[r][i], 8)) : low[r][i]);
    }
  };
};

#elif defined(HEADRACE_ISA_AVX2)

struct Lanes {
  using Floats = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kVectors = 1;
  // 4 rows: their sums, the values at hand and the products fill 12 to 14 of the 16 registers.
  static constexpr int Rows(bool) { return 4; }

  static HEADRACE_INLINE Floats Zero() { return _mm256_setzero_ps(); }
  static HEADRACE_INLINE Floats Load(const float* x) { return _mm256_loadu_ps(x); }
  static HEADRACE_INLINE void Store(float* x, Floats value) { _mm256_storeu_ps(x, value); }
  static HEADRACE_INLINE Floats All(const uint8_t* x) { return _mm256_set1_ps(At<float>(x)); }
  static HEADRACE_INLINE Floats Times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static HEADRACE_INLINE Floats Fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static HEADRACE_INLINE Floats Factors(const uint8_t* bytes, bool float32) {
    if (float32) return _mm256_loadu_ps(reinterpret_cast<const float*>(bytes));
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static HEADRACE_INLINE __m256i Four(const uint8_t* x) { return _mm256_set1_epi32(At<int32_t>(x)); }

  // Values are unpacked as they are read, once for every 4 rows.
  template <int kBits, int kGroup, bool kInt16, int kVectors>
  struct Group {
    static constexpr int kRecord = RecordSize(kGroup, kInt16), kBytes = (kInt16 ? 2 : 1) * kGroup;
    const uint8_t* block;

    // part: which half of the columns, 32 of each 64 bytes.
    HEADRACE_INLINE Group(const uint8_t* blocks, ptrdiff_t, int part) : block(blocks + 32 * part) {}

    template <int kRows>
    HEADRACE_INLINE void Sums(const uint8_t* x, Floats (&sums)[kRows][1]) const {
      if (kInt16) {
        SumsInt16<kRows>(x, sums);
      } else {
        SumsInt8<kRows>(x, sums);
      }
    }

    // Halves of values are 0..15: 8 sums of two products are 8 * 2 * 15 * 127 = 30480 at most, one int16 for a group.
    // 8 bits are two such halves.
    template <int kRows>
    HEADRACE_INLINE void SumsInt8(const uint8_t* x, Floats (&sums)[kRows][1]) const {
      constexpr int kHalf = kBits == 4 ? kGroup / 2 : 0;  // in which record bytes the high halves are multiplied
      const __m256i mask = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
      __m256i low[kRows], high[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int v = 0; v < kGroup * kBits / 32; v++) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 64 * v));
        const __m256i w0 = _mm256_and_si256(both, mask), w1 = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) {
          const uint8_t* four = x + r * kRecord + 4 * v;
          low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(w0, Four(four)));
          HEADRACE_KEEP(low[r]);
          __m256i& sum = kBits == 4 ? low[r] : high[r];
          sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w1, Four(four + kHalf)));
          HEADRACE_KEEP(sum);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        __m256i sum = _mm256_madd_epi16(low[r], one);
        if (kBits == 8) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(high[r], _mm256_set1_epi16(16)));
        sums[r][0] = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, Four(x + r * kRecord + kBytes + 8)));
      }
    }

    // A lane holds bytes b0 b1 b2 b3; b0 b2 and b1 b3 are widened in place, so activations lie in the order 0 2 1 3.
    template <int kRows>
    HEADRACE_INLINE void SumsInt16(const uint8_t* x, Floats (&sums)[kRows][1]) const {
      __m256i sum[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) sum[r] = Four(x + r * kRecord + kBytes + 8);
#pragma GCC unroll 8
      for (int v = 0; v < kGroup * kBits / 32; v++) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 64 * v));
        constexpr int kParts = kBits == 4 ? 4 : 2;
        __m256i w[kParts];
        if (kBits == 4) {
          const __m256i mask = _mm256_set1_epi16(15);
          w[0] = _mm256_and_si256(both, mask);
          w[1] = _mm256_and_si256(_mm256_srli_epi16(both, 8), mask);
          w[kParts - 2] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
          w[kParts - 1] = _mm256_srli_epi16(both, 12);
        } else {
          w[0] = _mm256_and_si256(both, _mm256_set1_epi16(255));
          w[1] = _mm256_srli_epi16(both, 8);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) {
          const uint8_t* pairs = x + r * kRecord + 8 * v;
#pragma GCC unroll 4
          for (int part = 0; part < kParts; part++) {
            const __m256i two = Four(pairs + 4 * (part & 1) + (part < 2 ? 0 : kGroup));
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(w[part], two));
            HEADRACE_KEEP(sum[r]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) sums[r][0] = _mm256_cvtepi32_ps(sum[r]);
    }
  };
};

#elif defined(HEADRACE_ISA_NEON)

struct Lanes {
  using Floats = float32x4_t;
  static constexpr int kWidth = 4;
  static constexpr int kVectors = 1;
  static constexpr int Rows(bool) { return 4; }

  static HEADRACE_INLINE Floats Zero() { return vdupq_n_f32(0); }
  static HEADRACE_INLINE Floats Load(const float* x) { return vld1q_f32(x); }
  static HEADRACE_INLINE void Store(float* x, Floats value) { vst1q_f32(x, value); }
  static HEADRACE_INLINE Floats All(const uint8_t* x) { return vdupq_n_f32(At<float>(x)); }
  static HEADRACE_INLINE Floats Times(Floats a, Floats b) { return vmulq_f32(a, b); }
  static HEADRACE_INLINE Floats Fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static HEADRACE_INLINE Floats Factors(const uint8_t* bytes, bool float32) {
    if (float32) return vreinterpretq_f32_u8(vld1q_u8(bytes));
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(bytes)));
  }
  static HEADRACE_INLINE int8x16_t Four(const uint8_t* x) {
    return vreinterpretq_s8_s32(vdupq_n_s32(At<int32_t>(x)));
  }

  // sdot takes signed values only: 8 bits lose 128, which the sum of the record gives back. int16 is two int8 halves.
  template <int kBits, int kGroup, bool kInt16, int kVectors>
  struct Group {
    static constexpr int kSteps = kGroup / 4, kRecord = RecordSize(kGroup, kInt16), kBytes = (kInt16 ? 2 : 1) * kGroup;
    const uint8_t* block;

    // part: which quarter of the columns, 16 of each 64 bytes.
    HEADRACE_INLINE Group(const uint8_t* blocks, ptrdiff_t, int part) : block(blocks + 16 * part) {}

    HEADRACE_INLINE int8x16_t Values(int step) const {
      const uint8x16_t bytes = vld1q_u8(block + 64 * (kBits == 8 ? step : step % (kSteps / 2)));
      if (kBits == 8) return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(128)));
      return vreinterpretq_s8_u8(step < kSteps / 2 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
    }

    template <int kRows>
    HEADRACE_INLINE void Sums(const uint8_t* x, Floats (&sums)[kRows][1]) const {
      int32x4_t low[kRows], high[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        const uint8_t* factors = x + r * kRecord + kBytes;
        low[r] = vdupq_n_s32(At<int32_t>(factors + 8) + (kBits == 8 ? 128 * At<int32_t>(factors + 12) : 0));
        high[r] = vdupq_n_s32(0);
      }
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; step++) {
        const int8x16_t values = Values(step);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) {
          const uint8_t* four = x + r * kRecord + 4 * step;
          low[r] = vdotq_s32(low[r], values, Four(four));
          HEADRACE_KEEP(low[r]);
          if (!kInt16) continue;
          high[r] = vdotq_s32(high[r], values, Four(four + kGroup));
          HEADRACE_KEEP(high[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++)
        sums[r][0] = vcvtq_f32_s32(kInt16 ? vaddq_s32(low[r], vshlq_n_s32(high[r], 8)) : low[r]);
    }
  };
};

#else
#error "no integer kernels for this instruction set"
#endif

}  // namespace headrace::quant::HEADRACE_ISA
