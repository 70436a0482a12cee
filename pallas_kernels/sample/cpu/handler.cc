// HeadraceDraw: one id of each row, rows side by side on the team.
#include <string>
#include <vector>

#include "native/cpu_features.h"
#include "native/handler.h"
#include "sample/cpu/draw.h"

HEADRACE_DECLARE(headrace::sample::DrawTable, GetDrawTable)

namespace headrace::sample {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Flags = ffi::ResultBuffer<ffi::PRED>;

ffi::Error Draw(ffi::ThreadPool pool, Floats logits, Integers real, Floats temperature, Integers top_k, Floats top_p,
                Floats floor, Floats uniform, ffi::ResultBuffer<ffi::S32> token, Flags is_finite, Flags has_choice) {
  const DrawTable* const table = HEADRACE_CHOSEN(GetDrawTable);
  if (table == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "draw: no instruction set of this CPU");
  const auto shape = logits.dimensions();
  if (shape.size() != 2 || shape[1] < 1 || shape[1] > (int64_t{1} << 24))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "draw: logits are [R, V] with 1 to 2^24 ids");
  for (size_t count : {real.element_count(), temperature.element_count(), top_k.element_count(), top_p.element_count(),
                       floor.element_count(), uniform.element_count(), token->element_count(),
                       is_finite->element_count(), has_choice->element_count()})
    if (static_cast<int64_t>(count) != shape[0])
      return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                        "draw: " + std::to_string(count) + " values for " + std::to_string(shape[0]) + " rows");
  auto choose = [&](int r) {
    Choice choice{0, true, true};
    if (real.typed_data()[r]) {
      const Row row{logits.typed_data() + r * shape[1], static_cast<int32_t>(shape[1]),
                    temperature.typed_data()[r],        top_k.typed_data()[r],
                    top_p.typed_data()[r],              floor.typed_data()[r],
                    uniform.typed_data()[r]};
      static thread_local std::vector<float> room;
      if (row.temperature > 0 && room.size() < RoomOf(row.size)) room.resize(RoomOf(row.size));
      choice = table->choose(row, room.data());
    }
    token->typed_data()[r] = choice.token;
    is_finite->typed_data()[r] = choice.is_finite;
    has_choice->typed_data()[r] = choice.has_choice;
  };
  RunOnPool(pool, static_cast<int>(shape[0]), choose);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace headrace::sample

namespace ffi = xla::ffi;

HEADRACE_HANDLER(HeadraceDraw, headrace::sample::Draw,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Arg<ffi::Buffer<ffi::F32>>()
                     .Ret<ffi::Buffer<ffi::S32>>()
                     .Ret<ffi::Buffer<ffi::PRED>>()
                     .Ret<ffi::Buffer<ffi::PRED>>());
