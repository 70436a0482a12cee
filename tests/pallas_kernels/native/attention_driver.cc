// Attention without XLA, for sanitizers and for what no test in Python reaches: random steps, every number of threads,
// every instruction set that this processor has. Results must be near a dense softmax in double, and equal bit for bit
// over threads, instruction sets, and a plan of single rows; memory around the pool must stay as it was.
//
// Usage: attention_driver [steps] [seed]; prints what it did, exit 1 at the first difference.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "native/cpu_features.h"
#include "paged_attention/cpu/plan.h"
#include "thread_pool.h"

using namespace headrace;
using attention::Functions;
using attention::group_of;
using attention::page_row;
using attention::Step;
using attention::Stored;

namespace {

struct Case {
  Step step{};
  std::vector<float> qkv, cos, sin, sinks, scales, out;
  std::vector<uint8_t> pages;
  std::vector<int32_t> position, table, kv_len, blk_seq, blk_pos, blk_len;
  int64_t guard = 0;  // bytes before and behind the pool

  void Point() {
    step.qkv = qkv.data(), step.cos = cos.data(), step.sin = sin.data(), step.pages = pages.data() + guard;
    step.scales = scales.empty() ? nullptr : scales.data(), step.sinks = sinks.empty() ? nullptr : sinks.data();
    step.position = position.data(), step.table = table.data(), step.kv_len = kv_len.data();
    step.blk_seq = blk_seq.data(), step.blk_pos = blk_pos.data(), step.blk_len = blk_len.data(), step.out = out.data();
  }
};

int Bytes(Stored stored) { return stored == Stored::kFloat32 ? 4 : stored == Stored::kBFloat16 ? 2 : 1; }

Case MakeCase(std::mt19937& random) {
  auto pick = [&](int low, int high) { return int(std::uniform_int_distribution<int>(low, high)(random)); };
  std::normal_distribution<float> normal;
  Case c;
  Step& s = c.step;
  const int widths[] = {8, 16, 24, 64, 64, 128, 256}, pages[] = {8, 16, 16, 24, 64};
  s.head_dim = widths[pick(0, 6)], s.page_tokens = pages[pick(0, 4)], s.kv_heads = pick(1, 3);
  s.heads = s.kv_heads * pick(1, 9), s.stored = Stored(pick(0, 2)), s.scale = 0.3f;
  s.window = pick(0, 2) ? 0 : pick(1, 150), s.soft_cap = pick(0, 3) ? 0.f : 4.f;
  s.rows = pick(0, 5), s.blocks = pick(s.rows ? 0 : 1, 4), s.block_tokens = s.page_tokens * pick(1, 4);
  for (int b = 0; b < s.rows; b++) c.kv_len.push_back(pick(0, 4) ? pick(1, pick(0, 5) ? 200 : 900) : 0);
  int blocks = 0;
  while (blocks < s.blocks) {  // segments of some blocks, all but the last full; then padding
    const int start = s.page_tokens * pick(0, 6), count = pick(1, (s.blocks - blocks) * s.block_tokens);
    for (int i = 0; i < count; i += s.block_tokens, blocks++) {
      c.blk_seq.push_back(int(c.kv_len.size())), c.blk_pos.push_back(start + i);
      c.blk_len.push_back(std::min(s.block_tokens, count - i));
    }
    c.kv_len.push_back(start + count);
    if (pick(0, 1)) break;
  }
  for (; blocks < s.blocks; blocks++) c.blk_seq.push_back(s.rows), c.blk_pos.push_back(0), c.blk_len.push_back(0);
  s.sequences = int(c.kv_len.size());
  int next = 1;
  for (int length : c.kv_len) s.table_pages = std::max(s.table_pages, (length + s.page_tokens - 1) / s.page_tokens + 1);
  c.table.assign(size_t(s.sequences) * s.table_pages, 0);
  for (int z = 0; z < s.sequences; z++)
    for (int i = 0; i * s.page_tokens < c.kv_len[z]; i++) c.table[z * s.table_pages + i] = next++;
  for (int b = 0; b < s.rows; b++) c.position.push_back(std::max(0, c.kv_len[b] - 1));
  s.first_row = next, s.pool_rows = 2 * next;
  const int64_t values = s.pool_rows * s.kv_heads * s.page_tokens * 2 * s.head_dim;
  c.guard = 4096;
  c.pages.assign(values * Bytes(s.stored) + 2 * c.guard, 0x5a);
  for (int64_t i = 0; i < values; i++) {
    const float x = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (s.stored == Stored::kBFloat16) bits >>= 16;
    const int8_t level = int8_t(pick(-127, 127));
    if (s.stored == Stored::kInt8) std::memcpy(&bits, &level, 1);
    std::memcpy(c.pages.data() + c.guard + i * Bytes(s.stored), &bits, Bytes(s.stored));
  }
  if (s.stored == Stored::kInt8)
    for (int64_t i = 0; i < s.pool_rows * s.kv_heads * 2 * s.page_tokens; i++) c.scales.push_back(pick(1, 99) / 4e3f);
  if (!pick(0, 3))
    for (int i = 0; i < s.heads; i++) c.sinks.push_back(normal(random));
  const int tokens = s.rows + s.blocks * s.block_tokens;
  for (int i = 0; i < tokens * (s.heads + 2 * s.kv_heads) * s.head_dim; i++) c.qkv.push_back(normal(random));
  for (int i = 0; i < tokens * s.head_dim / 2; i++) {
    const float angle = normal(random) * 3;
    c.cos.push_back(std::cos(angle)), c.sin.push_back(std::sin(angle));
  }
  c.out.assign(size_t(tokens) * s.heads * s.head_dim, std::numeric_limits<float>::quiet_NaN());
  return c;
}

double StoredValue(const Case& c, int64_t head, int offset, int i, bool is_value) {
  const Step& s = c.step;
  const int64_t at = (head * s.page_tokens + offset) * 2 * s.head_dim + (is_value ? s.head_dim : 0) + i;
  const uint8_t* p = c.pages.data() + c.guard + at * Bytes(s.stored);
  if (s.stored == Stored::kInt8)
    return double(int8_t(*p)) * c.scales[(head * 2 + is_value) * s.page_tokens + offset];
  uint32_t bits = 0;
  std::memcpy(&bits, p, Bytes(s.stored));
  if (s.stored == Stored::kBFloat16) bits <<= 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Largest difference of one token from a dense softmax over what the pool holds now.
double Difference(const Case& c, int token, int sequence, int end) {
  const Step& s = c.step;
  const int width = s.head_dim, half = width / 2, first = s.window ? std::max(0, end - s.window) : 0;
  double worst = 0;
  for (int n = 0; n < s.heads; n++) {
    const float* x = c.qkv.data() + (size_t(token) * (s.heads + 2 * s.kv_heads) + n) * width;
    std::vector<double> q(width), value(width, 0.0), score;
    for (int i = 0; i < half; i++) {
      const double cos = c.cos[token * half + i], sin = c.sin[token * half + i];
      q[i] = x[i] * cos - x[i + half] * sin, q[i + half] = x[i + half] * cos + x[i] * sin;
    }
    double top = c.sinks.empty() ? -1e300 : c.sinks[n];
    const int kv = n / group_of(s);
    for (int t = first; t < end; t++) {
      const int64_t head = page_row(s, sequence, t) * s.kv_heads + kv;
      double sum = 0;
      for (int i = 0; i < width; i++) sum += q[i] * StoredValue(c, head, t % s.page_tokens, i, false);
      sum *= s.scale;
      if (s.soft_cap > 0) sum = s.soft_cap * std::tanh(sum / s.soft_cap);
      score.push_back(sum), top = std::max(top, sum);
    }
    double total = c.sinks.empty() ? 0 : std::exp(c.sinks[n] - top);
    for (int t = first; t < end; t++) {
      const int64_t head = page_row(s, sequence, t) * s.kv_heads + kv;
      const double weight = std::exp(score[t - first] - top);
      total += weight;
      for (int i = 0; i < width; i++) value[i] += weight * StoredValue(c, head, t % s.page_tokens, i, true);
    }
    const float* out = c.out.data() + (size_t(token) * s.heads + n) * width;
    for (int i = 0; i < width; i++) worst = std::max(worst, std::fabs(out[i] - value[i] / total));
  }
  return worst;
}

void Fail(const char* what, int index) {
  std::printf("step %d: %s\n", index, what);
  std::exit(1);
}

template <class T>
bool Same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)));
}

void Check(const Case& before, const std::vector<const Functions*>& all, ThreadPool& pool, int index) {
  auto schedule = [&](std::function<void()> task) { pool.Schedule(std::move(task)); };
  Case first = before;
  first.Point();
  const std::string why = attention::refusal(first.step);
  if (!why.empty()) Fail(why.c_str(), index);
  attention::run(first.step, *all[0], 1, schedule);
  for (const Functions* functions : all)
    for (int threads : {1, 2, 3, 7}) {
      Case again = before;
      again.Point();
      attention::run(again.step, *functions, threads, schedule);
      if (!Same(again.out, first.out)) Fail("results differ over threads or instruction sets", index);
      if (!Same(again.pages, first.pages) || !Same(again.scales, first.scales)) Fail("pools differ", index);
    }
  const Step& s = first.step;
  for (int64_t i = 0; i < first.guard; i++)
    if (first.pages[i] != 0x5a || first.pages[first.pages.size() - 1 - i] != 0x5a) Fail("written outside", index);
  double worst = 0;
  for (int b = 0; b < s.rows; b++)
    if (s.kv_len[b]) worst = std::max(worst, Difference(first, b, b, s.kv_len[b]));
  for (int j = 0; j < s.blocks; j++)
    for (int i = 0; i < s.blk_len[j]; i += 1 + i % 5)  // not all: this is the slow part
      worst = std::max(worst, Difference(first, s.rows + j * s.block_tokens + i, s.blk_seq[j], s.blk_pos[j] + i + 1));
  if (!(worst < 5e-5)) Fail("far from a dense softmax", index);
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 100;
  std::mt19937 random(argc > 2 ? std::atoi(argv[2]) : 1);
  std::vector<const Functions*> all;
  for (const char* name : {"avx512", "avx2", "neon"})
    if (HeadraceUseIsa(name) == 0) all.push_back(attention::chosen_functions());
  if (all.empty()) Fail("no instruction set", 0);
  ThreadPool pool(6);
  for (int i = 0; i < steps; i++) Check(MakeCase(random), all, pool, i);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // helpers let go of the team
  std::printf("%d steps, %zu instruction sets, threads 1, 2, 3, 7: equal\n", steps, all.size());
}
