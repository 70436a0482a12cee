// The parts of Team that do not depend on what is run; compiled for the base architecture.
#include "native/team.h"

#include <chrono>

namespace headrace {

namespace {
constexpr int kSpinsBeforeYield = 4096;  // about 100 us: longer means that the owner's core was taken from it
}

Team& Team::Global() {
  static Team* const team = new Team;
  return *team;
}

Team::Job* Team::Post(int n, Item item, void* context) {
  for (Job& job : jobs_) {
    if (job.is_taken.load(std::memory_order_relaxed) || job.is_taken.exchange(true, std::memory_order_acquire)) {
      continue;
    }
    job.num_items = n;
    job.item = item;
    job.context = context;
    job.done.store(0, std::memory_order_relaxed);
    // With Hire's load and Help's end in one total order: a helper that leaves and a caller that counts it as there
    // cannot both overlook the other.
    job.left.store(n, std::memory_order_seq_cst);
    return &job;
  }
  return nullptr;
}

bool Team::Hire(int wanted) {
  int hired = hired_.load(std::memory_order_seq_cst);
  while (hired < wanted) {
    if (hired_.compare_exchange_weak(hired, hired + 1, std::memory_order_seq_cst)) return true;
  }
  return false;
}

void Team::Dismiss() { hired_.fetch_sub(1, std::memory_order_seq_cst); }

bool Team::Claim(Job& job) {
  int left = job.left.load(std::memory_order_seq_cst);
  while (left > 0) {
    if (job.left.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      job.item(job.context, job.num_items - left);
      job.done.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
  return false;
}

bool Team::ClaimAny() {
  for (Job& job : jobs_) {
    if (Claim(job)) return true;
  }
  return false;
}

void Team::Help(bool may_linger) {
  using Clock = std::chrono::steady_clock;
  auto limit = std::chrono::microseconds(linger_us_ / 4);
  auto last = Clock::now();
  for (;;) {
    if (ClaimAny()) {
      while (ClaimAny()) {
      }
      limit = std::chrono::microseconds(linger_us_);
      last = Clock::now();
    } else if (!may_linger || Clock::now() - last >= limit) {
      break;
    }
    for (int i = 0; i < 8; i++) Pause();
  }
  Dismiss();
  while (ClaimAny()) {  // posted after the last look, by a caller that still counted this helper
  }
}

void Team::Finish(Job& job) {
  while (Claim(job)) {
  }
  for (int spins = 0; job.done.load(std::memory_order_acquire) < job.num_items; spins++) {
    if (spins < kSpinsBeforeYield) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  job.is_taken.store(false, std::memory_order_release);
}

}  // namespace headrace
