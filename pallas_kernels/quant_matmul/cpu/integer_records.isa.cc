// Activations become records of int8 or int16 values, for one instruction set (integer_kernels.h).
#if defined(HEADRACE_ISA_NEON)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstring>

#include "quant_matmul/cpu/integer_kernels.h"

namespace headrace::quant::HEADRACE_ISA {
namespace {

// Below this the reciprocal would overflow. NaN fails the comparison and stays in the scale.
constexpr float kSmallest = 4e-34f;

inline void Finish(float scale, int32_t sum, int zero, uint8_t* factors) {
  const float scaled = scale * static_cast<float>(sum);
  // At most 128 * 32 * 32639; unsigned, as the sum of what was not finite is anything.
  const uint32_t bias = 0u - static_cast<uint32_t>(zero) * static_cast<uint32_t>(sum);
  std::memcpy(factors, &scale, 4);
  std::memcpy(factors + 4, &scaled, 4);
  std::memcpy(factors + 8, &bias, 4);
  std::memcpy(factors + 12, &sum, 4);
}

#if defined(HEADRACE_ISA_NEON)

template <int kGroup, bool kInt16>
void PackGroup(const float* x, int zero, uint8_t* record) {
  constexpr float kLargest = kInt16 ? kLargestInt16 : kLargestInt8;
  int32_t largest = 0, sum = 0;  // non-negative floats and NaNs above them have the order of their bits
  for (int k = 0; k < kGroup; k++) {
    int32_t bits;
    std::memcpy(&bits, x + k, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float most;
  std::memcpy(&most, &largest, 4);
  const float scale = most < kSmallest ? 0.0f : most * (1.0f / kLargest);
  const float inverse = most < kSmallest ? 0.0f : kLargest / most;
  for (int k = 0; k < kGroup; k += 4) {
    int32_t q[4];
    vst1q_s32(q, vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k), inverse)));
    for (int i = 0; i < 4; i++) {
      sum += q[i];
      record[k + i] = static_cast<uint8_t>(q[i]);
      if (kInt16) record[kGroup + k + i] = static_cast<uint8_t>((q[i] + 128) >> 8);  // q = 256 high + low
    }
  }
  Finish(scale, sum, zero, record + (kInt16 ? 2 : 1) * kGroup);
}

#else

// The largest of 8 floats that are not negative, or a NaN if one is there: their order is that of their bits.
inline float LargestBits(__m256i bits) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

inline int Sum(__m256i values) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

// 16 int32 as int8, in order.
inline __m128i Int8(__m256i a, __m256i b) {
  const __m256i words = _mm256_packs_epi32(a, b);  // 0-3 8-11 | 4-7 12-15
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  return _mm_shuffle_epi32(bytes, 0xd8);
}

template <int kGroup, bool kInt16>
void PackGroup(const float* x, int zero, uint8_t* record) {
  constexpr int kParts = kGroup / 8;
  constexpr float kLargest = kInt16 ? kLargestInt16 : kLargestInt8;
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256 values[kParts];
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < kParts; i++) {
    values[i] = _mm256_loadu_ps(x + 8 * i);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(values[i]), magnitude));
  }
  const float most = LargestBits(largest);
  const float scale = most < kSmallest ? 0.0f : most * (1.0f / kLargest);
  const __m256 inverse = _mm256_set1_ps(most < kSmallest ? 0.0f : kLargest / most);
  __m256i q[kParts], sums = _mm256_setzero_si256();
  for (int i = 0; i < kParts; i++) {
    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
    sums = _mm256_add_epi32(sums, q[i]);
  }
  for (int i = 0; i < kParts; i += 2) {
    uint8_t* to = record + 8 * i;
    if (!kInt16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), Int8(q[i], q[i + 1]));
      continue;
    }
#if defined(HEADRACE_ISA_AVX512)
    // Low bytes, then high bytes: q = 256 high + low with low in -128..127.
    const __m256i half = _mm256_set1_epi32(128);
    __m256i low[2], high[2];
    for (int j = 0; j < 2; j++) {
      low[j] = _mm256_srai_epi32(_mm256_slli_epi32(q[i + j], 24), 24);
      high[j] = _mm256_srai_epi32(_mm256_add_epi32(q[i + j], half), 8);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), Int8(low[0], low[1]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kGroup), Int8(high[0], high[1]));
#else
    // int16 in the order 0 2 1 3 of each four (integer_lanes.h).
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[i], q[i + 1]), 0xd8);
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(record + 16 * i), _mm256_shuffle_epi8(words, order));
#endif
  }
  Finish(scale, Sum(sums), zero, record + (kInt16 ? 2 : 1) * kGroup);
}

#endif

template <int kGroup, bool kInt16>
void PackGroups(const float* x, int64_t groups, int zero, int64_t rows, int64_t row, uint8_t* records) {
  for (int64_t g = 0; g < groups; g++)
    PackGroup<kGroup, kInt16>(x + kGroup * g, zero, records + (g * rows + row) * RecordSize(kGroup, kInt16));
}

}  // namespace

size_t RecordBytes(Mode mode, int group) { return size_t(RecordSize(group, mode == Mode::kInt16)); }

void PackRow(const float* x, int64_t groups, int group, Mode mode, int zero, int64_t rows, int64_t row,
             uint8_t* records) {
  const bool int16 = mode == Mode::kInt16;
  const auto pack = group == 32 ? (int16 ? PackGroups<32, true> : PackGroups<32, false>)
                                : (int16 ? PackGroups<16, true> : PackGroups<16, false>);
  pack(x, groups, zero, rows, row, records);
}

void Product(const uint8_t* tiles, const Form& form, int64_t groups, Mode mode, const uint8_t* records, int64_t rows,
             int64_t num_tiles, float* out, int64_t ld) {
  const auto run = mode == Mode::kInt16 ? ProductInt16 : ProductInt8;
  run(tiles, form, groups, records, rows, num_tiles, out, ld);
}

}  // namespace headrace::quant::HEADRACE_ISA
