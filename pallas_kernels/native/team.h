// Runs independent items on the calling thread and on helpers borrowed from XLA's intra-op pool.
#pragma once
#include <immintrin.h>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

class Team {
 public:
  using Fn = void (*)(void* ctx, int item);
  std::atomic<int> linger_us{200};

  // schedule(f): put f() on the pool. helpers: how many helpers we would like (threads - 1).
  template <class Body, class Schedule>
  void Run(int n, int helpers, Body& body, Schedule&& schedule) {
    if (n <= 0) return;
    if (n == 1 || helpers <= 0 || !busy_.try_lock()) {  // another program owns the team: run alone
      for (int i = 0; i < n; i++) body(i);
      return;
    }
    fn_ = [](void* c, int i) { (*static_cast<Body*>(c))(i); };
    ctx_ = &body;
    done_.store(0, std::memory_order_relaxed);
    uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(epoch << 32 | uint64_t(n) << 16, std::memory_order_release);
    for (int a = active_.load(); a < helpers; a = active_.load()) {
      active_.fetch_add(1);
      schedule([this] { Helper(); });
    }
    while (Claim()) {}
    while (done_.load(std::memory_order_acquire) < n) _mm_pause();
    busy_.unlock();
  }
  static Team& Global() { static Team* t = new Team; return *t; }

 private:
  bool Claim() {
    uint64_t t = ticket_.load(std::memory_order_acquire);
    for (;;) {
      uint32_t n = (t >> 16) & 0xffff, i = t & 0xffff;
      if (i >= n) return false;
      if (ticket_.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel)) {
        fn_(ctx_, int(i));
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }
  void Helper() {
    using clk = std::chrono::steady_clock;
    auto last = clk::now();
    for (;;) {
      bool any = false;
      while (Claim()) any = true;
      auto now = clk::now();
      if (any) { last = now; continue; }
      if (now - last >= std::chrono::microseconds(linger_us.load(std::memory_order_relaxed))) break;
      for (int i = 0; i < 8; i++) _mm_pause();
    }
    active_.fetch_sub(1);
  }
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> active_{0};
  Fn fn_ = nullptr;
  void* ctx_ = nullptr;
  std::mutex busy_;
};

