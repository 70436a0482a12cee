// One id of one row of logits: the best one, or one that is drawn.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace::sample {

struct Row {
  const float* logits;  // size of them; -inf forbids an id
  int32_t size;         // at least 1
  float temperature;    // up to 0: the best id, and nothing else of this row is read
  int32_t top_k;        // 0 or less keeps all
  float top_p;          // share of what top_k left; 1 or more keeps all
  float floor;          // log of min_p; -inf keeps all
  float uniform;        // in [0, 1)
};

struct Choice {
  int32_t token;    // in range also where there is no choice
  bool is_finite;   // all logits are
  bool has_choice;  // one logit at least is above -inf
};

// Floats that Choose writes to.
constexpr size_t RoomOf(int64_t size) { return 4 * ((static_cast<size_t>(size) + 15) / 16 * 16); }

struct DrawTable {
  Choice (*choose)(const Row& row, float* room);
};

}  // namespace headrace::sample
