// The thread team over pools of plain threads: every item once, whoever calls, whatever the pool does.
// Built with a sanitizer by test_sanitized.py. Argument: rounds of each case.
#include "native/team.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "thread_pool.h"

namespace {

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Counts are plain ints: two threads on one item are a data race, and an item that its caller cannot see yet is, too.
template <class Schedule>
void RunOnce(Team& team, int n, int helpers, Schedule&& schedule, const char* what) {
  std::vector<int> counts(static_cast<size_t>(n));
  auto body = [&](int i) { counts[static_cast<size_t>(i)] += i + 1; };
  team.Run(n, helpers, body, schedule);
  for (int i = 0; i < n; i++) Check(counts[static_cast<size_t>(i)] == i + 1, what);
}

void ManyCallers(int rounds, int num_callers, int num_workers) {
  ThreadPool pool(num_workers);
  std::vector<std::thread> callers;
  for (int c = 0; c < num_callers; c++) {
    callers.emplace_back([&pool, rounds, c, num_workers] {
      auto schedule = [&pool](auto task) { pool.Schedule(task); };
      for (int r = 0; r < rounds; r++) RunOnce(Team::Global(), 1 + (r * 7 + c) % 40, num_workers, schedule, "callers");
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Every worker of the pool is itself a caller: a caller that waited for a helper to start would hang.
void CallersOnTheOnlyWorkers(int rounds) {
  std::atomic<int> finished{0};
  {
    ThreadPool pool(2);
    for (int r = 0; r < rounds; r++) {
      pool.Schedule([&pool, &finished] {
        RunOnce(Team::Global(), 16, 1, [&pool](auto task) { pool.Schedule(task); }, "workers");
        finished.fetch_add(1);
      });
    }
  }
  Check(finished.load() == rounds, "all callers on workers finish");
}

// The pool ends while helpers linger, again and again.
void PoolsThatEnd(int rounds) {
  for (int r = 0; r < rounds; r++) {
    ThreadPool pool(3);
    RunOnce(Team::Global(), 50, 3, [&pool](auto task) { pool.Schedule(task); }, "pools that end");
  }
}

void OddPools(int rounds) {
  Team team(/*linger_us=*/20);
  for (int r = 0; r < rounds; r++) {
    RunOnce(team, 33, 4, [](auto task) { task(); }, "a pool without workers runs tasks at once");
    RunOnce(team, 33, 4, [](auto) { throw std::bad_alloc(); }, "no memory for a task");
    RunOnce(team, 33, 0, [](auto) { Check(false, "no helpers wanted"); }, "alone");
    RunOnce(team, 1, 4, [](auto) { Check(false, "no helpers for one item"); }, "one item");
    RunOnce(team, 0, 4, [](auto) { Check(false, "no helpers for no item"); }, "no item");
  }
  RunOnce(team, 200'000, 1, [](auto task) { task(); }, "more items than 16 bits count");
}

// More callers at once than the team has jobs: the rest runs alone; and bodies that call Run themselves.
void Nested(int rounds) {
  ThreadPool pool(2);
  auto schedule = [&pool](auto task) { pool.Schedule(task); };
  for (int r = 0; r < rounds; r++) {
    std::vector<int> sums(12);
    auto outer = [&](int i) {
      std::vector<int> parts(9);
      auto inner = [&](int j) { parts[static_cast<size_t>(j)] = j; };
      Team::Global().Run(9, 2, inner, schedule);
      for (int part : parts) sums[static_cast<size_t>(i)] += part;
    };
    Team::Global().Run(12, 2, outer, schedule);
    for (int sum : sums) Check(sum == 36, "nested");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  ManyCallers(rounds, 1, 1);
  ManyCallers(rounds, 3, 2);
  ManyCallers(rounds / 4, 12, 2);
  CallersOnTheOnlyWorkers(rounds);
  PoolsThatEnd(rounds / 4);
  OddPools(rounds / 4);
  Nested(rounds / 4);
  std::puts("every item ran once");
  return 0;
}
