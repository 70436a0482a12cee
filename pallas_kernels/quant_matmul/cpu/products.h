// Products of activations with tiled weights, as work for a team of threads. No XLA here.
#pragma once
#include <cstdint>

#include "quant_matmul/cpu/micro_kernels.h"

namespace headrace::quant {

constexpr int kMaxWeights = 8;

struct Weight {
  const uint8_t* tiles;
  Form form;
  int64_t columns;  // without those of padding
  int64_t Tiles() const { return (columns + kTile - 1) / kTile; }
  int64_t Groups(int64_t k) const { return (k + form.group - 1) / form.group; }
};

// What becomes of x [rows][k], or [rows][2k] where it is gated, before the product.
struct Input {
  const float* x;
  int64_t rows, k;
  bool is_gated;
  const float* norm;  // [k], or null
  float eps;
  const int32_t* row_of = nullptr;  // which row of x, and of the results, each row is; null where they are the same
  int64_t Row(int64_t r) const { return row_of ? row_of[r] : r; }
};

// body(context, item) for items 0 .. n, in any order, on any threads; returns when all are done.
struct Workers {
  int threads;
  void* self;
  void (*run)(void* self, int n, void (*body)(void*, int), void* context);
};

// out [rows][sum of columns] = input times the weights side by side (+ residual, of the same shape, or null).
void Multiply(const MicroKernels& kernels, Mode mode, const Input& input, const Weight* weights, int num_weights,
              const float* residual, float* out, const Workers& workers);

// Of each row of the product with one weight: the best column, its value, and whether all are finite.
void BestColumn(const MicroKernels& kernels, Mode mode, const Input& input, const Weight& weight, int32_t* column,
                float* value, bool* is_finite, const Workers& workers);

// out [count][k] = columns index[i] of the weight. False where an index is out of range.
bool Columns(const Weight& weight, int64_t k, const int32_t* index, int64_t count, float* out);

}  // namespace headrace::quant
