// Draws without XLA, for sanitizers: rows of every size and cut, each in memory of exactly its size, on two threads.
// Every instruction set must choose the same id, one that is allowed and that the cuts keep.
//
// Usage: sample_driver [rows] [seed]; prints what it did, exit 1 at the first difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "native/cpu_features.h"
#include "native/team.h"
#include "sample/cpu/draw.h"
#include "thread_pool.h"

HEADRACE_DECLARE(headrace::sample::DrawTable, GetDrawTable)

using headrace::sample::Choice;
using headrace::sample::DrawTable;
using headrace::sample::RoomOf;
using headrace::sample::Row;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  std::vector<float> logits;
  Row row;
};

Case MakeCase(std::mt19937& random) {
  auto pick = [&](int low, int high) { return int(std::uniform_int_distribution<int>(low, high)(random)); };
  auto share = [&] { return std::uniform_real_distribution<float>(0, 1)(random); };
  const int sizes[] = {1, 2, 15, 16, 17, 127, 128, 129, 1000, 1024, 4095, 4097, 6400, 9001};
  Case c;
  const int size = sizes[pick(0, 13)], kind = pick(0, 5);
  std::normal_distribution<float> normal(0, kind == 0 ? 0.1f : 3);
  for (int i = 0; i < size; i++) {
    float x = normal(random);
    if (kind == 1) x = std::min(2.f, std::round(x));  // many are the best
    if (kind == 2 && pick(0, 1)) x = -kInfinity;
    c.logits.push_back(x);
  }
  if (kind == 3) c.logits[pick(0, size - 1)] = pick(0, 1) ? std::nanf("") : kInfinity;
  const float temperatures[] = {0, 0.3f, 1, 1, 20, 1e7f};
  c.row = {nullptr, size, temperatures[pick(0, 5)], pick(0, 2) ? 0 : pick(1, size + 1), pick(0, 1) ? 1 : share(),
           pick(0, 2) ? -kInfinity : std::log(share()), pick(0, 9) ? share() * 0.9999f : 0};
  return c;
}

// Why the choice cannot be right, or null. The cuts of float64, with a little room.
const char* Wrong(const Case& c, const Choice& choice) {
  const std::vector<float>& x = c.logits;
  bool is_finite = true, has_nan = false;
  float best = -kInfinity;
  for (float v : x) is_finite &= std::isfinite(v), has_nan |= std::isnan(v), best = v > best ? v : best;
  if (choice.token < 0 || choice.token >= c.row.size) return "an id out of range";
  if (choice.is_finite != is_finite || choice.has_choice != (best > -kInfinity)) return "flags";
  if (has_nan || !std::isfinite(best)) return nullptr;
  if (x[choice.token] == -kInfinity) return "a forbidden id";
  if (!(c.row.temperature > 0))
    return x[choice.token] != best || std::find(x.begin(), x.end(), best) - x.begin() != choice.token ? "not the best"
                                                                                                      : nullptr;
  auto z_of = [&](float v) { return (v - best) / c.row.temperature; };
  std::vector<float> z;
  for (float v : x) z.push_back(z_of(v));
  std::sort(z.begin(), z.end(), std::greater<float>());
  const float own = z_of(x[choice.token]);
  size_t kept = z.size();
  if (c.row.top_k > 0 && c.row.top_k < c.row.size) {
    if (own < z[c.row.top_k - 1]) return "below top_k";
    kept = std::upper_bound(z.begin(), z.end(), z[c.row.top_k - 1], std::greater<float>()) - z.begin();
  }
  if (own < c.row.floor) return "below min_p";
  double mass = 0, ahead = 0;
  for (size_t i = 0; i < kept; i++) mass += std::exp(double(z[i]));
  for (size_t i = 0; i < kept && z[i] > own; i++) ahead += std::exp(double(z[i]));
  if (c.row.top_p < 1 && ahead > (c.row.top_p + 1e-5) * mass) return "below top_p";
  return nullptr;
}

}  // namespace

int main(int count, char** words) {
  const int rows = count > 1 ? std::atoi(words[1]) : 400;
  std::mt19937 random(count > 2 ? std::atoi(words[2]) : 1);
  std::vector<Case> cases;
  for (int i = 0; i < rows; i++) cases.push_back(MakeCase(random));
  headrace::Team team;
  ThreadPool pool(2);  // ends first: its threads may still look at the team
  std::vector<Choice> first;
  for (const char* isa : {"avx2", "avx512", "neon"}) {
    if (HeadraceUseIsa(isa) != 0) continue;
    const DrawTable* const table = HEADRACE_CHOSEN(GetDrawTable);
    std::vector<Choice> found(rows);
    auto choose = [&](int i) {
      Row row = cases[i].row;
      std::vector<float> room(RoomOf(row.size), std::nanf(""));
      row.logits = cases[i].logits.data();
      found[i] = table->choose(row, room.data());
    };
    team.Run(rows, 2, choose, [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
    for (int i = 0; i < rows; i++) {
      const char* why = Wrong(cases[i], found[i]);
      if (why == nullptr && !first.empty() && first[i].token != found[i].token) why = "another id than before";
      if (why == nullptr) continue;
      const Row& row = cases[i].row;
      std::printf("%s: row %d: %s: %d of %d ids\n", isa, i, why, found[i].token, row.size);
      std::printf("temperature %g, top_k %d, top_p %g, floor %g, uniform %g\n", row.temperature, row.top_k, row.top_p,
                  row.floor, row.uniform);
      return 1;
    }
    std::printf("%s: %d rows are right\n", isa, rows);
    first = found;
  }
  return first.empty();
}
