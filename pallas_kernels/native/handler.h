// What every FFI handler needs: a symbol that is seen from outside, and the team on XLA's intra-op pool.
#pragma once
#include <utility>

#include "native/team.h"
#include "xla/ffi/api/ffi.h"

// As XLA_FFI_DEFINE_HANDLER_SYMBOL; everything else in the library is hidden. Name it in TARGETS (library.py).
#define HEADRACE_HANDLER(name, implementation, ...)                                              \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*);      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, implementation, __VA_ARGS__)

namespace headrace {

// body(item) for each item in [0, n) on the caller and on all workers of the pool but one.
template <class Body>
void RunOnPool(xla::ffi::ThreadPool& pool, int n, Body& body) {
  const int helpers = static_cast<int>(pool.num_threads()) - 1;
  Team::Global().Run(n, helpers, body, [&pool](auto task) { pool.Schedule(std::move(task)); });
}

}  // namespace headrace
