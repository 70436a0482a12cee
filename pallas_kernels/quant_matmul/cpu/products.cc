// Splits products into items: rows are prepared in parallel, then ranges of tiles are computed in parallel.
#include "quant_matmul/cpu/products.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

namespace headrace::quant {
namespace {

constexpr int64_t kChunkRows = 128;    // whose prepared activations stay in L2
constexpr int64_t kItemsPerThread = 8;  // enough to even out, few enough that claiming costs nothing
constexpr double kSmall = 6e4;         // multiplications below which handing over costs more than it saves
constexpr int64_t kPartTiles = 4;      // tiles that are computed apart at a time: 32 KiB at 128 rows, on the stack
constexpr int64_t kBestTiles = 8;      // tiles of logits at a time: 64 KiB at 128 rows

// Grows, and is used again by the next product on this thread: fresh pages would cost more than a small product.
class Scratch {
 public:
  uint8_t* Get(size_t bytes) {
    if (bytes > size_) {
      data_ = std::make_unique<uint8_t[]>(bytes + 64);
      size_ = bytes;
    }
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(data_.get()) + 63) & ~uintptr_t(63));
  }

 private:
  std::unique_ptr<uint8_t[]> data_;
  size_t size_ = 0;
};

template <class Body>
void ForEach(const Workers& workers, int64_t n, Body&& body) {
  if (n <= 1 || workers.threads <= 1) {
    for (int64_t i = 0; i < n; i++) body(int(i));
    return;
  }
  workers.run(workers.self, int(n), [](void* context, int i) { (*static_cast<Body*>(context))(i); }, &body);
}

// Rows first .. first + rows of the input, in the form in which each weight's kernel reads them.
class Activations {
 public:
  Activations(const MicroKernels& kernels, Mode mode, const Input& input, const Weight* weights, int num_weights)
      : kernels_(kernels), mode_(mode), input_(input), padded_((input.k + 31) / 32 * 32) {
    for (int i = 0; i < num_weights; i++) {
      const Form& form = weights[i].form;
      int same = 0;
      while (same < num_packs_ && (packs_[same].group != form.group || packs_[same].zero != form.zero)) same++;
      if (same == num_packs_) packs_[num_packs_++] = {form.group, form.zero, nullptr};
      pack_of_[i] = same;
    }
  }

  void Prepare(int64_t first, int64_t rows, const Workers& workers) {
    static thread_local Scratch floats, records[kMaxWeights];
    rows_ = rows;
    const bool is_plain = !input_.is_gated && !input_.norm && !input_.row_of;
    const bool is_direct = is_plain && input_.k == padded_;
    x_ = is_direct ? input_.x + first * input_.k : reinterpret_cast<float*>(floats.Get(size_t(rows * padded_) * 4));
    ldx_ = padded_;
    if (mode_ != Mode::kExact)
      for (int p = 0; p < num_packs_; p++)
        packs_[p].records = records[p].Get(size_t(padded_ / packs_[p].group) * rows *
                                           kernels_.record_bytes(mode_, packs_[p].group));
    if (is_direct && mode_ == Mode::kExact) return;
    auto prepare = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const float* row = x_ + r * ldx_;
        if (!is_direct) PrepareRow(first + r, const_cast<float*>(row));
        if (mode_ != Mode::kExact)
          for (int p = 0; p < num_packs_; p++) {
            const Pack& pack = packs_[p];
            kernels_.pack_row(row, (input_.k + pack.group - 1) / pack.group, pack.group, mode_, pack.zero, rows, r,
                              pack.records);
          }
      }
    };
    if (rows < 16) return prepare(0, rows);
    ForEach(workers, (rows + 7) / 8, [&](int i) { prepare(i * 8, std::min<int64_t>(rows, i * 8 + 8)); });
  }

  // Tiles first .. first + count of weight i, for all rows.
  void Multiply(const Weight& weight, int i, int64_t first, int64_t count, float* out, int64_t ld) const {
    const int64_t groups = weight.Groups(input_.k);
    const uint8_t* tiles = weight.tiles + first * groups * weight.form.BlockBytes();
    if (mode_ == Mode::kExact)
      kernels_.exact(tiles, weight.form, groups, x_, ldx_, rows_, count, out, ld);
    else
      kernels_.product(tiles, weight.form, groups, mode_, packs_[pack_of_[i]].records, rows_, count, out, ld);
  }

 private:
  struct Pack {
    int group, zero;
    uint8_t* records;
  };

  void PrepareRow(int64_t row, float* out) const {
    const int64_t k = input_.k;
    const float* x = input_.x + input_.Row(row) * k * (input_.is_gated ? 2 : 1);
    if (input_.is_gated)
      kernels_.gated(x, x + k, k, out);
    else if (input_.norm)
      kernels_.rms(x, input_.norm, input_.eps, k, out);
    else
      std::memcpy(out, x, size_t(k) * 4);
    std::fill(out + k, out + padded_, 0.f);
  }

  const MicroKernels& kernels_;
  const Mode mode_;
  const Input& input_;
  const int64_t padded_;
  Pack packs_[kMaxWeights];
  int pack_of_[kMaxWeights], num_packs_ = 0;
  int64_t rows_ = 0, ldx_ = 0;
  const float* x_ = nullptr;
};

// Tiles of one item, a multiple of 4 or of 2 where there is a choice: so many do kernels take at a time.
int64_t TilesPerItem(int64_t tiles, double work, int threads) {
  const int64_t most = std::min(threads * kItemsPerThread, std::max<int64_t>(threads, tiles / 4));
  const int64_t items = work < kSmall || threads <= 1 ? 1 : most;
  const int64_t each = (tiles + items - 1) / items;
  const int64_t step = each > 8 ? 4 : each > 1 ? 2 : 1;
  return (each + step - 1) / step * step;
}

}  // namespace

void Multiply(const MicroKernels& kernels, Mode mode, const Input& input, const Weight* weights, int num_weights,
              const float* residual, float* out, const Workers& workers) {
  int64_t columns = 0, tiles = 0;
  for (int i = 0; i < num_weights; i++) columns += weights[i].columns, tiles += weights[i].Tiles();
  Activations activations(kernels, mode, input, weights, num_weights);
  for (int64_t r0 = 0; r0 < input.rows; r0 += kChunkRows) {
    const int64_t rows = std::min(kChunkRows, input.rows - r0);
    activations.Prepare(r0, rows, workers);
    const int64_t each = TilesPerItem(tiles, double(rows) * columns * input.k, workers.threads);
    ForEach(workers, (tiles + each - 1) / each, [&](int item) {
      const int64_t begin = item * each, end = std::min(tiles, begin + each);
      int64_t tile = 0, column = 0;  // where weight i begins
      for (int i = 0; i < num_weights; tile += weights[i].Tiles(), column += weights[i].columns, i++) {
        const Weight& weight = weights[i];
        const int64_t full = weight.columns / kTile;  // the last tile may have columns of padding
        const int64_t t0 = std::max(begin - tile, int64_t(0)), t1 = std::min(end - tile, weight.Tiles());
        if (t0 >= t1) continue;
        float* y = out + column;
        const int64_t apart = input.row_of ? t0 : full;  // tiles from here on are computed elsewhere, then copied
        if (t0 < apart)
          activations.Multiply(weight, i, t0, std::min(t1, apart) - t0, y + r0 * columns + t0 * kTile, columns);
        for (int64_t t = std::max(t0, apart); t < t1; t += kPartTiles) {
          float part[kChunkRows * kPartTiles * kTile];
          const int64_t ld = kPartTiles * kTile, wide = std::min((t1 - t) * kTile, ld);
          activations.Multiply(weight, i, t, wide / kTile, part, ld);
          for (int64_t r = 0; r < rows; r++)
            std::copy_n(part + r * ld, std::min(wide, weight.columns - t * kTile),
                        y + input.Row(r0 + r) * columns + t * kTile);
        }
        if (!residual) continue;
        const float* add = residual + column;
        const int64_t c0 = t0 * kTile, c1 = std::min(t1 * kTile, weight.columns);
        for (int64_t r = 0; r < rows; r++) {
          const int64_t at = input.Row(r0 + r) * columns;
          for (int64_t c = c0; c < c1; c++) y[at + c] += add[at + c];
        }
      }
    });
  }
}

void BestColumn(const MicroKernels& kernels, Mode mode, const Input& input, const Weight& weight, int32_t* column,
                float* value, bool* is_finite, const Workers& workers) {
  static thread_local std::vector<Best> of_items;
  const int64_t tiles = weight.Tiles();
  Activations activations(kernels, mode, input, &weight, 1);
  for (int64_t r0 = 0; r0 < input.rows; r0 += kChunkRows) {
    const int64_t rows = std::min(kChunkRows, input.rows - r0);
    activations.Prepare(r0, rows, workers);
    const int64_t each = TilesPerItem(tiles, double(rows) * weight.columns * input.k, workers.threads);
    const int64_t items = (tiles + each - 1) / each;
    if (int64_t(of_items.size()) < items * rows) of_items.resize(items * rows);
    Best* all = of_items.data();
    ForEach(workers, items, [&](int item) {
      static thread_local Scratch logits;
      float* y = reinterpret_cast<float*>(logits.Get(kChunkRows * kBestTiles * kTile * 4));
      const int64_t begin = item * each, end = std::min(tiles, begin + each);
      for (int64_t t = begin; t < end; t += kBestTiles) {
        const int64_t count = std::min(kBestTiles, end - t), c0 = t * kTile;
        const int64_t real = std::min(count * kTile, weight.columns - c0);
        activations.Multiply(weight, 0, t, count, y, kBestTiles * kTile);
        for (int64_t r = 0; r < rows; r++) {
          Best here = kernels.best(y + r * kBestTiles * kTile, real);
          here.index += c0;
          Best& best = all[item * rows + r];
          if (t == begin) {
            best = here;
            continue;
          }
          here.finite = here.finite && best.finite;
          if (here.value > best.value) best = here;
          best.finite = here.finite;
        }
      }
    });
    for (int64_t r = 0; r < rows; r++) {
      Best best = all[r];
      for (int64_t i = 1; i < items; i++) {
        const Best& here = all[i * rows + r];
        const bool finite = best.finite && here.finite;
        if (here.value > best.value) best = here;
        best.finite = finite;
      }
      const int64_t row = input.Row(r0 + r);
      column[row] = int32_t(best.index);
      value[row] = best.value;
      is_finite[row] = best.finite;
    }
  }
}

}  // namespace headrace::quant
