// Two loops for the check of spills: one whose sums fit in the registers of AVX2, one with more than there are.
#if defined(__x86_64__)
#include <immintrin.h>

namespace {

template <int kSums>
__attribute__((always_inline)) inline void Sum(const float* x, float* y, long n) {
  __m256 sums[kSums];
#pragma GCC unroll 32
  for (int s = 0; s < kSums; s++) sums[s] = _mm256_loadu_ps(y + 8 * s);
  for (long i = 0; i < n; i++) {
    const __m256 factor = _mm256_set1_ps(x[i]);
#pragma GCC unroll 32
    for (int s = 0; s < kSums; s++) {
      sums[s] = _mm256_fmadd_ps(sums[s], factor, factor);
      asm volatile("" : "+x"(sums[s]));
    }
  }
#pragma GCC unroll 32
  for (int s = 0; s < kSums; s++) _mm256_storeu_ps(y + 8 * s, sums[s]);
}

}  // namespace

void SumsInRegisters(const float* x, float* y, long n) { Sum<12>(x, y, n); }
void SumsOnTheStack(const float* x, float* y, long n) { Sum<24>(x, y, n); }
#endif
