// Runs independent items on the calling thread and on helpers borrowed from a thread pool.
//
// A handler that waits for tasks it has scheduled can hang: it may itself sit on the only free worker of that pool. So
// nobody here waits for a task to start. The caller publishes its items as a count of what is left, takes items off it
// like any helper, and in the end waits only for items that somebody has taken and is running. Helpers that come late,
// or never, cost speed and nothing else.
#pragma once
#include <algorithm>
#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // "yield" is a no-op on most cores
#endif
}

class Team {
 public:
  static constexpr int kJobs = 8;
  // How long a helper looks for more work after its last item before it gives its worker back: handing an item to a
  // waiting helper costs about 1 us, waking a sleeping worker up to 900. One that found nothing at all looks a quarter
  // as long: where many handlers run at once, the worker has better to do.
  static constexpr int kLingerUs = 200;

  // A team without jobs in it may be destroyed; the one of the process never is.
  explicit Team(int linger_us = kLingerUs) : linger_us_(linger_us) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The process' own. It outlives every pool: a helper may still look at it while static objects are destroyed.
  static Team& Global();

  // body(item) for each item in [0, n), each once, in any order, on any thread; returns when all are done.
  // n: any. helpers: at most this many threads besides the caller are asked for (threads - 1); 0 = the caller alone.
  // schedule(task): puts task() on a pool, or runs it at once; may be called min(helpers, n - 1) times.
  // A body must not throw (the process ends) and must not wait for other items; it may call Run itself.
  // Any number of threads may call Run at once: kJobs of them share the helpers, more run alone.
  template <class Body, class Schedule>
  void Run(int n, int helpers, Body& body, Schedule&& schedule) {
    const Item item = [](void* context, int i) noexcept { (*static_cast<Body*>(context))(i); };
    void* const context = const_cast<void*>(static_cast<const void*>(std::addressof(body)));
    Job* const job = n > 1 && helpers > 0 ? Post(n, item, context) : nullptr;
    if (job == nullptr) {
      for (int i = 0; i < n; i++) item(context, i);
      return;
    }
    // Counted, not "until there are enough": a pool without workers runs the task here and now, and it is gone again.
    const int wanted = std::min(helpers, n - 1);
    for (int asked = 0; asked < wanted && Hire(wanted); asked++) {
      try {
        schedule([this, caller = std::this_thread::get_id()] { Help(std::this_thread::get_id() != caller); });
      } catch (...) {  // no memory for the task: then without it; items are published and must be finished
        Dismiss();
        break;
      }
    }
    Finish(*job);
  }

 private:
  using Item = void (*)(void* context, int item) noexcept;

  // left: items that nobody has taken. Whoever lowers it from v to v - 1 owns item num_items - v of the job that is
  // there at that moment; the rest is read after that, so it does not matter which job was there when v was read (no
  // ABA), and Finish cannot return before the owner is done.
  struct Job {
    alignas(64) std::atomic<int> left{0};
    alignas(64) std::atomic<int> done{0};
    alignas(64) std::atomic<bool> is_taken{false};
    int num_items = 0;
    Item item = nullptr;
    void* context = nullptr;
  };

  Job* Post(int n, Item item, void* context);
  bool Hire(int wanted);
  void Dismiss();
  void Help(bool may_linger);
  void Finish(Job& job);
  static bool Claim(Job& job);
  bool ClaimAny();

  const int linger_us_;
  Job jobs_[kJobs];
  alignas(64) std::atomic<int> hired_{0};
};

}  // namespace headrace

using headrace::Team;
