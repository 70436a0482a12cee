// Attention to the last page of a pool that lies by itself on the heap: whatever is read or written behind it, a
// sanitizer sees. Heads of every width, of every stored type, on every instruction set that this processor has.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "native/cpu_features.h"
#include "paged_attention/cpu/plan.h"

using namespace headrace;
using attention::Step;
using attention::Stored;

namespace {

constexpr int kPageTokens = 8, kPages = 2;

bool IsFinite(int width, Stored stored) {
  const size_t values = size_t(kPages) * kPageTokens * 2 * width;
  const int bytes = stored == Stored::kFloat32 ? 4 : stored == Stored::kBFloat16 ? 2 : 1;
  const auto pages = std::make_unique<uint8_t[]>(values * bytes);
  std::vector<float> qkv(3 * width, 0.5f), cos(width / 2, 1.f), sin(width / 2, 0.f), out(width);
  std::vector<float> scales(kPages * 2 * kPageTokens, 1.f);
  const int32_t position = kPageTokens - 1, table = 0, kv_len = kPageTokens;
  Step step{};
  step.qkv = qkv.data(), step.cos = cos.data(), step.sin = sin.data(), step.out = out.data();
  step.pages = pages.get(), step.scales = stored == Stored::kInt8 ? scales.data() : nullptr;
  step.position = &position, step.table = &table, step.kv_len = &kv_len;
  step.rows = step.sequences = step.table_pages = step.heads = step.kv_heads = 1;
  step.head_dim = width, step.page_tokens = kPageTokens, step.first_row = kPages - 1, step.pool_rows = kPages;
  step.scale = 1, step.stored = stored;
  if (!attention::refusal(step).empty()) return false;
  attention::run(step, *attention::chosen_functions(), 1, [](std::function<void()> task) { task(); });
  for (float x : out)
    if (!std::isfinite(x)) return false;
  return true;
}

}  // namespace

int main() {
  for (const char* name : {"avx512", "avx2", "neon"}) {
    if (HeadraceUseIsa(name) != 0) continue;
    for (Stored stored : {Stored::kFloat32, Stored::kBFloat16, Stored::kInt8})
      for (int width = 8; width <= attention::kMaxHeadDim; width += 8)
        if (!IsFinite(width, stored)) {
          std::printf("%s: width %d, stored %d\n", name, width, int(stored));
          return 1;
        }
    std::printf("%s done\n", name);
  }
}
