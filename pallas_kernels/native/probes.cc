// Handlers that measure the machine and the team: HeadraceStream reads, HeadraceNop does next to nothing in many items.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "native/cpu_features.h"
#include "native/handler.h"
#include "native/stream.h"

HEADRACE_DECLARE(headrace::StreamTable, GetStreamTable)

namespace headrace {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kItemWords = 1 << 17;  // 1 MiB an item

// The XOR of the 64-bit words of all inputs.
ffi::Error Stream(ffi::ThreadPool pool, ffi::RemainingArgs buffers, ffi::ResultBuffer<ffi::U32> sum_2) {
  const StreamTable* const table = HEADRACE_CHOSEN(GetStreamTable);
  if (table == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "HeadraceStream: no instruction set");
  if (sum_2->element_count() != 2) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "HeadraceStream: result is [2]");
  std::atomic<uint64_t> sum{0};
  for (size_t b = 0; b < buffers.size(); b++) {
    const auto buffer = buffers.get<ffi::AnyBuffer>(b);
    if (buffer.has_error()) return buffer.error();
    if (buffer->size_bytes() % 8 != 0) {
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, "HeadraceStream: bytes of a buffer are no multiple of 8");
    }
    const uint64_t* const words = static_cast<const uint64_t*>(buffer->untyped_data());
    const size_t num_words = buffer->size_bytes() / 8;
    auto read = [&](int item) {
      const size_t first = static_cast<size_t>(item) * kItemWords;
      sum.fetch_xor(table->exclusive_or(words + first, std::min(kItemWords, num_words - first)),
                    std::memory_order_relaxed);
    };
    RunOnPool(pool, static_cast<int>((num_words + kItemWords - 1) / kItemWords), read);
  }
  sum_2->typed_data()[0] = static_cast<uint32_t>(sum.load());
  sum_2->typed_data()[1] = static_cast<uint32_t>(sum.load() >> 32);
  return ffi::Error::Success();
}

// y[i] = x[i] + 1, in num_items items; and how many threads the pool has.
ffi::Error Nop(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> x_n, ffi::ResultBuffer<ffi::S32> y_n,
               ffi::ResultBuffer<ffi::S32> threads, int32_t num_items) {
  const int64_t n = static_cast<int64_t>(x_n.element_count());
  if (num_items < 1) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "HeadraceNop: num_items must be positive");
  if (y_n->element_count() != x_n.element_count() || threads->element_count() != 1) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "HeadraceNop: results are [N] and [1]");
  }
  const int32_t* const x = x_n.typed_data();
  int32_t* const y = y_n->typed_data();
  auto add = [&](int item) {
    for (int64_t i = n * item / num_items; i < n * (item + 1) / num_items; i++) y[i] = x[i] + 1;
  };
  RunOnPool(pool, num_items, add);
  threads->typed_data()[0] = static_cast<int32_t>(pool.num_threads());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace headrace

HEADRACE_HANDLER(HeadraceStream, headrace::Stream,
                 xla::ffi::Ffi::Bind()
                     .Ctx<xla::ffi::ThreadPool>()
                     .RemainingArgs()
                     .Ret<xla::ffi::Buffer<xla::ffi::U32>>());
HEADRACE_HANDLER(HeadraceNop, headrace::Nop,
                 xla::ffi::Ffi::Bind()
                     .Ctx<xla::ffi::ThreadPool>()
                     .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                     .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                     .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                     .Attr<int32_t>("num_items"));
