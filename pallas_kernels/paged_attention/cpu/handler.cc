// The custom call: checks shapes and every index, then runs the step on XLA's own threads.
#include <functional>
#include <string>

#include "native/handler.h"
#include "paged_attention/cpu/plan.h"

namespace ffi = xla::ffi;

namespace headrace::attention {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

ffi::Error Refused(const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "rotary_attention: " + why);
}

ffi::Error Impl(ffi::ThreadPool pool, Floats qkv, Floats cos, Floats sin, ffi::AnyBuffer pages, Floats scales,
                Floats sinks, Ints first_row, Ints position, Ints table, Ints kv_len, Ints blk_seq, Ints blk_pos,
                Ints blk_len, ffi::Result<Floats> out, ffi::Result<ffi::AnyBuffer> pages_out,
                ffi::Result<Floats> scales_out, float scale, int32_t window, float soft_cap) {
  const auto shape = pages.dimensions();
  if (shape.size() != 4 || qkv.dimensions().size() != 2 || table.dimensions().size() != 2)
    return Refused("pages have four axes, qkv and the table two");
  if (pages.untyped_data() != pages_out->untyped_data() ||
      (scales.element_count() && scales.untyped_data() != scales_out->untyped_data()))
    return Refused("the pool is not updated in place; donate it");
  Step step{};
  step.qkv = qkv.typed_data(), step.cos = cos.typed_data(), step.sin = sin.typed_data();
  step.pages = pages.untyped_data();
  step.scales = scales.element_count() ? scales.typed_data() : nullptr;
  step.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  step.position = position.typed_data(), step.table = table.typed_data(), step.kv_len = kv_len.typed_data();
  step.blk_seq = blk_seq.typed_data(), step.blk_pos = blk_pos.typed_data(), step.blk_len = blk_len.typed_data();
  step.out = out->typed_data();
  step.pool_rows = shape[0], step.kv_heads = int(shape[1]), step.page_tokens = int(shape[2]);
  step.head_dim = int(shape[3] / 2), step.sequences = int(table.dimensions()[0]);
  step.table_pages = int(table.dimensions()[1]);
  step.rows = int(position.element_count()), step.blocks = int(blk_seq.element_count());
  const int64_t tokens = qkv.dimensions()[0], width = out->dimensions()[1];
  step.heads = step.head_dim ? int(width / step.head_dim) : 0;
  step.block_tokens = step.blocks ? int((tokens - step.rows) / step.blocks) : 0;
  step.scale = scale, step.window = window, step.soft_cap = soft_cap;
  step.first_row = first_row.typed_data()[0];
  switch (pages.element_type()) {
    case ffi::F32: step.stored = Stored::kFloat32; break;
    case ffi::BF16: case ffi::U16: step.stored = Stored::kBFloat16; break;
    case ffi::S8: step.stored = Stored::kInt8; break;
    default: return Refused("pages of this type");
  }
  if (window < 0) return Refused("window " + std::to_string(window) + "; 1 or more, or 0 for none");
  if (shape[3] % 2 || step.head_dim % 8 || step.head_dim < 8 || step.head_dim > kMaxHeadDim || step.page_tokens % 8 ||
      !step.kv_heads || width != int64_t(step.heads) * step.head_dim || step.heads % step.kv_heads ||
      group_of(step) > kMaxGroup ||
      qkv.dimensions()[1] != int64_t(step.heads + 2 * step.kv_heads) * step.head_dim ||
      out->dimensions()[0] != tokens || int64_t(cos.element_count()) != tokens * step.head_dim / 2 ||
      int64_t(sin.element_count()) != tokens * step.head_dim / 2 || (step.stored == Stored::kInt8) != !!step.scales ||
      (step.scales && int64_t(scales.element_count()) != shape[0] * shape[1] * 2 * shape[2]) ||
      (step.sinks && int64_t(sinks.element_count()) != step.heads))
    return Refused("shapes that do not agree");
  if (tokens != step.rows + int64_t(step.blocks) * step.block_tokens || step.rows > step.sequences ||
      int64_t(kv_len.element_count()) != step.sequences || blk_pos.element_count() != blk_seq.element_count() ||
      blk_len.element_count() != blk_seq.element_count())
    return Refused("a batch whose arrays do not agree");
  const std::string why = refusal(step);
  if (!why.empty()) return Refused(why);
  const int threads = int(pool.num_threads());
  const Functions* const functions = chosen_functions();
  if (functions == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "rotary_attention: no instruction set");
  run(step, *functions, threads, [&](std::function<void()> f) { pool.Schedule(std::move(f)); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace headrace::attention

HEADRACE_HANDLER(HeadraceRotaryAttention, headrace::attention::Impl,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Ret<ffi::Buffer<ffi::F32>>()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::Buffer<ffi::F32>>()
                     .Attr<float>("scale")
                     .Attr<int32_t>("window")
                     .Attr<float>("soft_cap"));
