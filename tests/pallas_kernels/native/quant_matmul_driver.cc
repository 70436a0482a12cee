// Products with tiled weights in buffers of exactly their size, over all forms, modes, instruction sets and odd shapes,
// on a team of threads. Built with a sanitizer by test_sanitized_products.py; checks results against plain loops.
// Argument: nothing, or a mistake to plant, which must end the program with an error: "value" changes one stored value,
// "overrun" hands the kernels one tile more than there is.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "native/cpu_features.h"
#include "native/team.h"
#include "quant_matmul/cpu/products.h"
#include "thread_pool.h"

namespace {

using namespace headrace::quant;
using headrace::Team;

void Check(bool holds, const char* what, const Form& form, Mode mode, int64_t rows, int64_t k, int64_t n) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s (%s, int%d in %d, zero %d, affine %d, wide %d, mode %d, %ldx%ldx%ld)\n", what,
               HeadraceIsa(), form.bits, form.group, form.zero, form.affine, form.wide, int(mode), long(rows), long(k),
               long(n));
  std::exit(1);
}

// Heap memory of exactly `count` values, aligned as XLA's: one read or write outside is found.
template <class T>
struct Exactly {
  explicit Exactly(size_t count)
      : size(count), data(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64))) {
    tail = (64 - count * sizeof(T) % 64) % 64;
    std::memset(data, 0, count * sizeof(T) + tail);
  }
  Exactly(const Exactly&) = delete;
  ~Exactly() {
    const char* end = reinterpret_cast<const char*>(data + size);
    for (size_t i = 0; i < tail; i++)
      if (end[i]) std::fprintf(stderr, "failed: a write behind a result\n"), std::abort();
    std::free(data);
  }
  T& operator[](size_t i) { return data[i]; }
  size_t size, tail;
  T* data;
};

struct Random {
  std::mt19937 engine{7};
  float operator()(float low, float high) { return std::uniform_real_distribution<float>(low, high)(engine); }
  int operator()(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
};

uint16_t Half(int value) {  // value * 2^-10 for 1 <= value < 2048
  int exponent = 31 - __builtin_clz(unsigned(value));
  return uint16_t((exponent + 5) << 10 | ((value << (10 - exponent)) & 0x3ff));
}

bool plants_a_value = false;

// A weight in tiles, and the same as doubles [k][n].
struct TestWeight {
  TestWeight(Random& random, const Form& form, int64_t k, int64_t n)
      : weight{nullptr, form, n},
        tiles(size_t(weight.Tiles() * weight.Groups(k)) * form.BlockBytes()),
        values(size_t(k * n)) {
    weight.tiles = tiles.data;
    for (int64_t c = 0; c < n; c++)
      for (int64_t g = 0; g < weight.Groups(k); g++) {
        uint8_t* block = tiles.data + size_t(c / kTile * weight.Groups(k) + g) * form.BlockBytes();
        double factor[2] = {0, 0};
        for (int i = 0; i < 1 + form.affine; i++) {
          const int number = random(1, 2047);
          factor[i] = number / 1024.;
          uint8_t* at = block + form.ValueBytes() + i * form.ScaleBytes();
          const float wide = float(factor[i]);
          const uint16_t narrow = Half(number);
          if (form.wide)
            std::memcpy(at + 4 * (c % kTile), &wide, 4);
          else
            std::memcpy(at + 2 * (c % kTile), &narrow, 2);
        }
        for (int j = 0; j < form.group && g * form.group + j < k; j++) {
          const int u = random(0, (1 << form.bits) - 1), half = form.group / 2;
          const int row = form.bits == 4 ? j % half : j;
          block[64 * (row / 4) + 4 * (c % kTile) + row % 4] |= uint8_t(form.bits == 4 && j >= half ? u << 4 : u);
          values[size_t((g * form.group + j) * n + c)] = factor[0] * (u - form.zero) + factor[1];
        }
      }
    if (plants_a_value) tiles[5] ^= 0x50;
  }
  Weight weight;
  Exactly<uint8_t> tiles;
  std::vector<double> values;
};

struct Threads {
  ThreadPool pool{3};
  static void Run(void* self, int n, void (*body)(void*, int), void* context) {
    ThreadPool& pool = static_cast<Threads*>(self)->pool;
    auto item = [&](int i) { body(context, i); };
    Team::Global().Run(n, 3, item, [&pool](auto task) { pool.Schedule(task); });
  }
};

const MicroKernels& Kernels() { return *HEADRACE_CHOSEN(GetQuantKernels); }

// All of one form and shape; weights[1] is of another form.
void Shapes(Random& random, Threads& threads, const Form& form, Mode mode, int64_t rows, int64_t k, int64_t n) {
  const Workers team{4, &threads, Threads::Run}, alone{1, nullptr, nullptr};
  const Form other{8, 48 - form.group, 128, !form.affine, form.wide};
  TestWeight first(random, form, k, n), second(random, other, k, 19);
  Exactly<float> x(size_t(rows * k)), gated(size_t(rows * 2 * k)), norm{size_t(k)};
  for (size_t i = 0; i < x.size; i++) x[i] = random(-1.f, 1.f);
  for (size_t i = 0; i < gated.size; i++) gated[i] = random(-4.f, 4.f);
  for (int64_t i = 0; i < k; i++) norm[size_t(i)] = random(.5f, 1.f);
  const Weight weights[2] = {first.weight, second.weight};
  const int64_t columns = n + 19;
  Exactly<float> residual(size_t(rows * columns)), out(size_t(rows * columns)), again(size_t(rows * columns));
  for (size_t i = 0; i < residual.size; i++) residual[i] = random(-1.f, 1.f);

  Multiply(Kernels(), mode, {x.data, rows, k, false, nullptr, 0}, weights, 2, nullptr, out.data, team);
  const double bound = mode == Mode::kExact ? 1e-5 : mode == Mode::kInt16 ? 2e-4 : 5e-2;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < k; i++) {
        const double w = c < n ? first.values[size_t(i * n + c)] : second.values[size_t(i * 19 + c - n)];
        sum += x[size_t(r * k + i)] * w;
        size += w * w;
      }
      Check(std::fabs(out[size_t(r * columns + c)] - sum) <= bound * std::sqrt(size) + 1e-6, "a product", form, mode,
            rows, k, n);
    }
  Multiply(Kernels(), mode, {x.data, rows, k, false, nullptr, 0}, weights, 2, nullptr, again.data, alone);
  Check(!std::memcmp(out.data, again.data, out.size * 4), "one thread gives the same", form, mode, rows, k, n);
  for (int64_t r = 0; r < rows; r += 1 + rows / 3) {
    Multiply(Kernels(), mode, {x.data + r * k, 1, k, false, nullptr, 0}, weights, 2, nullptr, again.data, alone);
    Check(!std::memcmp(out.data + r * columns, again.data, size_t(columns) * 4), "a row alone", form, mode, rows, k, n);
  }
  Multiply(Kernels(), mode, {gated.data, rows, k, true, nullptr, 0}, weights, 2, residual.data, again.data, team);
  Multiply(Kernels(), mode, {x.data, rows, k, false, norm.data, 1e-5f}, weights, 2, residual.data, again.data, team);

  std::unique_ptr<int32_t[]> column(new int32_t[size_t(rows)]);
  std::unique_ptr<float[]> value(new float[size_t(rows)]);
  std::unique_ptr<bool[]> finite(new bool[size_t(rows)]);
  BestColumn(Kernels(), mode, {x.data, rows, k, false, nullptr, 0}, first.weight, column.get(), value.get(),
             finite.get(), team);
  for (int64_t r = 0; r < rows; r++) {
    int64_t best = 0;
    const float* y = out.data + r * columns;
    for (int64_t c = 1; c < n; c++) best = y[c] > y[best] ? c : best;
    Check(column[size_t(r)] == best && value[size_t(r)] == y[best] && finite[size_t(r)], "the best column", form, mode,
          rows, k, n);
  }
  const int32_t index[2] = {0, int32_t(n - 1)};
  Exactly<float> read(size_t(2 * k));
  Check(Columns(first.weight, k, index, 2, read.data), "columns in range", form, mode, rows, k, n);
  for (int64_t i = 0; i < 2 * k; i++)
    Check(read[size_t(i)] == float(first.values[size_t(i % k * n + index[i / k])]), "a column", form, mode, rows, k, n);
  const int32_t outside[1] = {int32_t(n)};
  Check(!Columns(first.weight, k, outside, 1, read.data), "a column outside", form, mode, rows, k, n);
}

// What must be found.
void Plant(const char* mistake) {
  Random random;
  Threads threads;
  const Form form{4, 32, 0, true, false};
  if (!std::strcmp(mistake, "value")) {
    plants_a_value = true;
    Shapes(random, threads, form, Mode::kInt8, 3, 64, 33);
  } else if (!std::strcmp(mistake, "overrun")) {
    TestWeight test(random, form, 64, 16);
    test.weight.columns = 32;
    Exactly<float> x(64), out(32);
    const Input input{x.data, 1, 64, false, nullptr, 0};
    Multiply(Kernels(), Mode::kExact, input, &test.weight, 1, nullptr, out.data, {1, nullptr, nullptr});
  }
}

void AllForms(const char* isa) {
  if (HeadraceUseIsa(isa) != 0) return;
  Random random;
  Threads threads;
  int cases = 0;
  for (int bits : {4, 8})
    for (int group : {16, 32})
      for (bool affine : {false, true})
        for (bool wide : {false, true})
          for (Mode mode : {Mode::kExact, Mode::kInt16, Mode::kInt8}) {
            const Form form{bits, group, bits == 8 ? 128 : affine ? 0 : 8, affine, wide};
            Shapes(random, threads, form, mode, 1, 33, 1);
            Shapes(random, threads, form, mode, random(2, 7), 96, 70);
            Shapes(random, threads, form, mode, random(8, 60), random(1, 300), random(1, 60));
            cases += 3;
            if (group == 32) Shapes(random, threads, form, mode, 131, 544, 37), cases++;
          }
  std::printf("%s: %d cases agree\n", isa, cases);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) return Plant(arguments[1]), 0;
  for (const char* isa : {"avx2", "avx512", "neon"}) AllForms(isa);
  return 0;
}
