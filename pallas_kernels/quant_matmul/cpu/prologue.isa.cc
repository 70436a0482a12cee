// What happens to a row before a product, and to a row of results after it. Sums run over 16 lanes on every machine.
#include "quant_matmul/cpu/isa_kernels.h"
#include "quant_matmul/cpu/vectors.h"

namespace headrace::quant::HEADRACE_ISA {
namespace {

// 2^n * p(f), relative error about 1e-7 in the range that is not clipped.
inline F Exp(F x) {
  x = Min(Max(x, Set(-87.f)), Set(88.f));
  const F n = Round(Mul(x, Set(1.44269504f)));
  F f = Fma(n, Set(-0.693359375f), x);
  f = Fma(n, Set(2.12194440e-4f), f);
  F p = Set(1.f / 720);
  p = Fma(p, f, Set(1.f / 120));
  p = Fma(p, f, Set(1.f / 24));
  p = Fma(p, f, Set(1.f / 6));
  p = Fma(p, f, Set(.5f));
  p = Fma(p, f, Set(1.f));
  p = Fma(p, f, Set(1.f));
  return Mul(p, PowerOfTwo(n));
}

inline F Silu(F gate) { return Div(gate, Add(Set(1.f), Exp(Mul(gate, Set(-1.f))))); }

}  // namespace

void Rms(const float* x, const float* scale, float eps, int64_t k, float* out) {
  F sum[kPerTile];
  for (int j = 0; j < kPerTile; j++) sum[j] = Zero();
  int64_t i = 0;
  for (; i + 16 <= k; i += 16)
    for (int j = 0; j < kPerTile; j++) {
      const F v = Load(x + i + j * kLanes);
      sum[j] = Fma(v, v, sum[j]);
    }
  float lanes[16];
  for (int j = 0; j < kPerTile; j++) Store(lanes + j * kLanes, sum[j]);
  for (int o = 0; i + o < k; o++) lanes[o] = __builtin_fmaf(x[i + o], x[i + o], lanes[o]);
  for (int half = 8; half; half /= 2)
    for (int o = 0; o < half; o++) lanes[o] += lanes[o + half];
  const float inverse = 1.f / __builtin_sqrtf(lanes[0] / float(k) + eps);
  const F factor = Set(inverse);
  int64_t c = 0;
  for (; c + kLanes <= k; c += kLanes) Store(out + c, Mul(Mul(Load(x + c), factor), Load(scale + c)));
  for (; c < k; c++) out[c] = x[c] * inverse * scale[c];
}

void Gated(const float* gate, const float* value, int64_t k, float* out) {
  int64_t c = 0;
  for (; c + kLanes <= k; c += kLanes) Store(out + c, Mul(Silu(Load(gate + c)), Load(value + c)));
  if (c == k) return;
  float g[kLanes] = {}, v[kLanes] = {};
  for (int64_t i = c; i < k; i++) g[i - c] = gate[i], v[i - c] = value[i];
  Store(g, Mul(Silu(Load(g)), Load(v)));
  for (int64_t i = c; i < k; i++) out[i] = g[i - c];
}

Best BestOf(const float* y, int64_t n) {
  const float low = -__builtin_inff();
  F most = Set(low), zeros = Zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F v = Load(y + i);
    most = Max(most, v);
    zeros = Fma(v, Zero(), zeros);  // NaN once a value is not finite
  }
  float lanes[kLanes], zero[kLanes], best = low, sum = 0;
  Store(lanes, most);
  Store(zero, zeros);
  for (int o = 0; o < kLanes; o++) {
    best = lanes[o] > best ? lanes[o] : best;
    sum += zero[o];
  }
  for (; i < n; i++) {
    best = y[i] > best ? y[i] : best;
    sum += y[i] * 0.f;
  }
  int64_t at = 0;
  while (at + 1 < n && y[at] != best) at++;
  if (y[at] != best) at = 0;  // only where there is NaN
  return {y[at], at, sum == 0.f};
}

}  // namespace headrace::quant::HEADRACE_ISA
