// XLA's calls: shapes are checked, then products.h does the work on threads of XLA's pool.
#include <algorithm>
#include <string>
#include <vector>

#include "native/handler.h"
#include "quant_matmul/cpu/products.h"

namespace headrace::quant {
namespace {

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using Attribute = ffi::Span<const int64_t>;

ffi::Error Invalid(const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "quant_matmul: " + why);
}

std::string Shape(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (size_t i = 0; i < dimensions.size(); i++) text += (i ? ", " : "") + std::to_string(dimensions[i]);
  return text + "]";
}

// Of a weight: columns, bits, group, zero, is_affine, is_wide.
constexpr int kFormNumbers = 6;

ffi::ErrorOr<Weight> ReadWeight(ffi::Buffer<ffi::U8> blocks, const int64_t* form, int64_t k, bool is_stacked,
                                int64_t layer) {
  Weight weight{blocks.typed_data(),
                {int(form[1]), int(form[2]), int(form[3]), form[4] != 0, form[5] != 0},
                form[0]};
  const Form& f = weight.form;
  if ((f.bits != 4 && f.bits != 8) || (f.group != 16 && f.group != 32) || f.zero < 0 || f.zero > 128)
    return ffi::Unexpected(Invalid("a weight is of 4 or 8 bits in groups of 16 or 32, not of " +
                                   std::to_string(f.bits) + " in " + std::to_string(f.group)));
  const auto shape = blocks.dimensions();
  const size_t lead = is_stacked;
  const int64_t groups = weight.Groups(k), bytes = f.BlockBytes();
  if (weight.columns < 1 || shape.size() != 3 + lead || shape[lead] != weight.Tiles() || shape[lead + 1] != groups ||
      shape[lead + 2] != bytes)
    return ffi::Unexpected(Invalid("blocks of shape " + Shape(shape) + " are not the [" +
                                   std::to_string(weight.Tiles()) + ", " + std::to_string(groups) + ", " +
                                   std::to_string(bytes) + "] of " + std::to_string(k) + " rows and " +
                                   std::to_string(weight.columns) + " columns"));
  if (is_stacked) {
    if (layer < 0 || layer >= shape[0])
      return ffi::Unexpected(Invalid("layer " + std::to_string(layer) + " of " + std::to_string(shape[0])));
    weight.tiles += layer * weight.Tiles() * groups * bytes;
  }
  return weight;
}

ffi::Error ReadInput(F32 x, F32 norm, bool is_gated, float eps, bool is_stacked, int64_t layer, Input& input) {
  if (x.dimensions().size() != 2 || (is_gated && x.dimensions()[1] % 2) || x.dimensions()[1] < 1)
    return Invalid("inputs of shape " + Shape(x.dimensions()) + (is_gated ? ", gate and value side by side" : ""));
  const int64_t k = x.dimensions()[1] / (is_gated ? 2 : 1);
  input = {x.typed_data(), x.dimensions()[0], k, is_gated, nullptr, eps};
  if (norm.element_count() == 0) return ffi::Error::Success();
  const auto shape = norm.dimensions();
  if (is_gated || shape.size() != (is_stacked ? 2u : 1u) || shape.back() != k)
    return Invalid("a norm of shape " + Shape(shape) + (is_gated ? " with gated inputs" : "") + " for " +
                   std::to_string(k) + " values");
  if (is_stacked && (layer < 0 || layer >= shape[0]))
    return Invalid("layer " + std::to_string(layer) + " of " + std::to_string(shape[0]) + " norms");
  input.norm = norm.typed_data() + (is_stacked ? layer * k : 0);
  return ffi::Error::Success();
}

// Leaves out the rows of padding, where `real` says which they are (0; empty: there are none). All rows of the results
// must be cleared before: nothing is written to those.
ffi::Error LeaveOut(ffi::Buffer<ffi::S32> real, Input& input, int64_t& all_rows) {
  static thread_local std::vector<int32_t> rows;
  all_rows = input.rows;
  if (real.element_count() == 0) return ffi::Error::Success();
  if (int64_t(real.element_count()) != all_rows)
    return Invalid(std::to_string(real.element_count()) + " marks of " + std::to_string(all_rows) + " rows");
  rows.clear();
  for (int64_t r = 0; r < all_rows; r++)
    if (real.typed_data()[r]) rows.push_back(int32_t(r));
  input.rows = int64_t(rows.size());
  // Rows in front need no list: they are where they are.
  if (!rows.empty() && rows.back() + 1 != input.rows) input.row_of = rows.data();
  return ffi::Error::Success();
}

ffi::Error ReadKernels(int64_t mode, const MicroKernels*& kernels) {
  kernels = HEADRACE_CHOSEN(GetQuantKernels);
  if (kernels == nullptr)
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "quant_matmul: no instruction set of this CPU");
  if (mode < 0 || mode > 2) return Invalid("activation mode " + std::to_string(mode));
  return ffi::Error::Success();
}

struct Pool {
  ffi::ThreadPool pool;
  static void Run(void* self, int n, void (*body)(void*, int), void* context) {
    ffi::ThreadPool& pool = static_cast<Pool*>(self)->pool;
    auto item = [&](int i) { body(context, i); };
    RunOnPool(pool, n, item);
  }
  Workers AsWorkers() { return {int(pool.num_threads()), this, Run}; }
};

ffi::Error FusedMatmul(ffi::ThreadPool threads, F32 x, F32 norm, F32 residual, ffi::Buffer<ffi::S32> real,
                       ffi::Buffer<ffi::S32> layer, ffi::RemainingArgs blocks, ffi::ResultBuffer<ffi::F32> out,
                       Attribute forms, bool is_stacked, bool is_gated, float eps, int64_t mode) {
  const size_t count = blocks.size();
  if (count < 1 || count > kMaxWeights || forms.size() != count * kFormNumbers)
    return Invalid(std::to_string(count) + " weights with " + std::to_string(forms.size()) +
                   " numbers of forms; 1 to " + std::to_string(kMaxWeights) + " weights");
  if (layer.element_count() != 1) return Invalid("one layer is meant, not " + std::to_string(layer.element_count()));
  const int64_t index = layer.typed_data()[0];
  const MicroKernels* kernels;
  if (ffi::Error error = ReadKernels(mode, kernels); error.failure()) return error;
  Input input;
  if (ffi::Error error = ReadInput(x, norm, is_gated, eps, is_stacked, index, input); error.failure()) return error;
  Weight weights[kMaxWeights];
  int64_t columns = 0;
  for (size_t i = 0; i < count; i++) {
    auto buffer = blocks.get<ffi::Buffer<ffi::U8>>(i);
    if (buffer.has_error()) return buffer.error();
    auto weight = ReadWeight(buffer.value(), forms.begin() + i * kFormNumbers, input.k, is_stacked, index);
    if (weight.has_error()) return weight.error();
    weights[i] = weight.value();
    columns += weights[i].columns;
  }
  const auto shape = out->dimensions();
  if (shape.size() != 2 || shape[0] != input.rows || shape[1] != columns)
    return Invalid("a result of shape " + Shape(shape) + " of " + std::to_string(columns) + " columns");
  const bool has_residual = residual.element_count() != 0;
  const auto added = residual.dimensions();
  if (has_residual && (added.size() != 2 || added[0] != shape[0] || added[1] != shape[1]))
    return Invalid("a residual of shape " + Shape(added) + " for a result of shape " + Shape(shape));
  int64_t all_rows;
  if (ffi::Error error = LeaveOut(real, input, all_rows); error.failure()) return error;
  if (input.row_of)
    std::fill_n(out->typed_data(), all_rows * columns, 0.f);
  else
    std::fill(out->typed_data() + input.rows * columns, out->typed_data() + all_rows * columns, 0.f);
  Pool pool{threads};
  Multiply(*kernels, Mode(mode), input, weights, int(count), has_residual ? residual.typed_data() : nullptr,
           out->typed_data(), pool.AsWorkers());
  return ffi::Error::Success();
}

ffi::Error BestOfColumns(ffi::ThreadPool threads, F32 x, F32 norm, ffi::Buffer<ffi::S32> real,
                         ffi::Buffer<ffi::U8> blocks, ffi::ResultBuffer<ffi::S32> column,
                         ffi::ResultBuffer<ffi::F32> value, ffi::ResultBuffer<ffi::PRED> is_finite, Attribute form,
                         float eps, int64_t mode) {
  if (form.size() != kFormNumbers) return Invalid(std::to_string(form.size()) + " numbers of a form");
  const MicroKernels* kernels;
  if (ffi::Error error = ReadKernels(mode, kernels); error.failure()) return error;
  Input input;
  if (ffi::Error error = ReadInput(x, norm, false, eps, false, 0, input); error.failure()) return error;
  auto weight = ReadWeight(blocks, form.begin(), input.k, false, 0);
  if (weight.has_error()) return weight.error();
  for (int64_t rows : {int64_t(column->element_count()), int64_t(value->element_count()),
                       int64_t(is_finite->element_count())})
    if (rows != input.rows)
      return Invalid(std::to_string(rows) + " results of " + std::to_string(input.rows) + " rows");
  int64_t all_rows;
  if (ffi::Error error = LeaveOut(real, input, all_rows); error.failure()) return error;
  std::fill_n(column->typed_data(), all_rows, 0);
  std::fill_n(value->typed_data(), all_rows, 0.f);
  std::fill_n(is_finite->typed_data(), all_rows, true);
  Pool pool{threads};
  BestColumn(*kernels, Mode(mode), input, weight.value(), column->typed_data(), value->typed_data(),
             is_finite->typed_data(), pool.AsWorkers());
  return ffi::Error::Success();
}

ffi::Error ReadColumns(ffi::Buffer<ffi::S32> index, ffi::Buffer<ffi::U8> blocks, ffi::ResultBuffer<ffi::F32> out,
                       Attribute form) {
  const auto shape = out->dimensions();
  if (form.size() != kFormNumbers || shape.size() != 2 || shape[0] != int64_t(index.element_count()))
    return Invalid(std::to_string(index.element_count()) + " columns into a result of shape " + Shape(shape));
  auto weight = ReadWeight(blocks, form.begin(), shape[1], false, 0);
  if (weight.has_error()) return weight.error();
  if (!Columns(weight.value(), shape[1], index.typed_data(), shape[0], out->typed_data()))
    return Invalid("a column outside of the " + std::to_string(weight.value().columns) + " that there are");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace headrace::quant

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Blocks = ffi::Buffer<ffi::U8>;
using Numbers = ffi::Span<const int64_t>;

// x, norm, residual (empty: none), real (empty: all), layer, blocks of each weight
HEADRACE_HANDLER(HeadraceFusedMatmul, headrace::quant::FusedMatmul,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<Floats>()
                     .Arg<Floats>()
                     .Arg<Floats>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .RemainingArgs()
                     .Ret<Floats>()
                     .Attr<Numbers>("forms")
                     .Attr<bool>("is_stacked")
                     .Attr<bool>("is_gated")
                     .Attr<float>("eps")
                     .Attr<int64_t>("mode"));

// x, norm (empty: none), real (empty: all), blocks
HEADRACE_HANDLER(HeadraceBestColumn, headrace::quant::BestOfColumns,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<Floats>()
                     .Arg<Floats>()
                     .Arg<ffi::Buffer<ffi::S32>>()
                     .Arg<Blocks>()
                     .Ret<ffi::Buffer<ffi::S32>>()
                     .Ret<Floats>()
                     .Ret<ffi::Buffer<ffi::PRED>>()
                     .Attr<Numbers>("form")
                     .Attr<float>("eps")
                     .Attr<int64_t>("mode"));

// index, blocks
HEADRACE_HANDLER(HeadraceColumns, headrace::quant::ReadColumns,
                 ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().Arg<Blocks>().Ret<Floats>().Attr<Numbers>("form"));
