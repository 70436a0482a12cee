// Sampling policy headrace-sampling/1 for one row (model/sampling.py), without a sort: z is a logit relative to the
// best one over the temperature, weight is e^z. Of one row of 49,152 ids all passes stay in the second-level cache.
//
// Sums have a fixed order that is the same for every instruction set: 16 columns or 128 lanes, in parts of a few
// thousand ids that are added up after that, so that many equal small weights do not drift.
#include "sample/cpu/draw.h"

#include "native/vector.h"

namespace headrace::HEADRACE_ISA {
namespace {

using sample::Choice;
using sample::Row;

constexpr int kWide = 16;              // ids of one turn of a loop
constexpr int kParts = kWide / kLanes;  // vectors of them
constexpr int kPlaces = 128;           // an id's lane is id modulo a divisor of this
constexpr int kStretch = 4096;         // ids whose weights are added in float32 before the sum goes to a wider one
constexpr int kCuts = 4;               // tried at once
constexpr float kInfinity = __builtin_huge_valf();
// For values up to 0 the negated bits of the negated value are an integer of the same order.
constexpr int32_t kLowest = -0x7f800000;  // of -inf

inline int Least(int a, int b) { return a < b ? a : b; }

inline float ValueOf(int32_t key) {
  const uint32_t bits = static_cast<uint32_t>(-key);
  float value;
  std::memcpy(&value, &bits, 4);
  return -value;
}

// Sixteen values from i on, with -inf behind the end.
inline const float* SixteenAt(const float* x, int i, int size, float* tail) {
  if (i + kWide <= size) return x + i;
  for (int j = 0; j < kWide; j++) tail[j] = i + j < size ? x[i + j] : -kInfinity;
  return tail;
}

// The best logit's lowest id; NaN counts for nothing.
Choice Best(const float* x, int size, float* best) {
  constexpr int kBlock = 1024;
  float top = -kInfinity, tail[kWide], lane[kWide];
  int found = 0;
  bool is_finite = true;
  const Vec zero = Set1(0);
  for (int first = 0; first < size; first += kBlock) {
    const int end = Least(size, first + kBlock);
    Vec most[kParts], none[kParts];  // none: 0, or NaN once a value was not finite
    for (int p = 0; p < kParts; p++) most[p] = Set1(-kInfinity), none[p] = zero;
    int i = first;
    for (; i + kWide <= end; i += kWide)
      for (int p = 0; p < kParts; p++) {
        const Vec v = Load(x + i + p * kLanes);
        most[p] = Max(v, most[p]);
        none[p] = Fma(v, zero, none[p]);
      }
    float largest = -kInfinity;
    for (int p = 0; p < kParts; p++) {
      Store(lane + p * kLanes, most[p]);
      Store(tail + p * kLanes, none[p]);
    }
    for (int j = 0; j < kWide; j++) {
      largest = lane[j] > largest ? lane[j] : largest;
      is_finite &= tail[j] == 0;
    }
    for (; i < end; i++) {
      largest = x[i] > largest ? x[i] : largest;
      is_finite &= x[i] * 0 == 0;
    }
    if (largest > top) top = largest, found = first;
  }
  while (found < size - 1 && x[found] != top) found++;
  *best = top;
  return {found, is_finite, top > -kInfinity};
}

// sums[c]: what candidates of z >= cut[c] weigh, or how many they are.
template <bool kCounts>
void SumsAbove(const float* z, const float* weight, int count, const float* cut, float* sums) {
  float total[kCuts][kWide] = {};
  const Vec zero = Set1(0), one = Set1(1);
  for (int first = 0; first < count; first += kStretch) {
    Vec sum[kCuts][kParts];
    for (int c = 0; c < kCuts; c++)
      for (int p = 0; p < kParts; p++) sum[c][p] = zero;
    for (int i = first; i < Least(count, first + kStretch); i += kWide)
      for (int p = 0; p < kParts; p++) {
        const Vec at = Load(z + i + p * kLanes), w = kCounts ? one : Load(weight + i + p * kLanes);
        for (int c = 0; c < kCuts; c++) sum[c][p] = Add(sum[c][p], WhereLess(at, Set1(cut[c]), zero, w));
      }
    for (int c = 0; c < kCuts; c++)
      for (int p = 0; p < kParts; p++) {
        float* const to = total[c] + p * kLanes;
        Store(to, Add(Load(to), sum[c][p]));
      }
  }
  for (int c = 0; c < kCuts; c++) {
    for (int half = kWide / 2; half; half /= 2)
      for (int j = 0; j < half; j++) total[c][j] += total[c][j + half];
    sums[c] = total[c][0];
  }
}

#if defined(HEADRACE_ISA_AVX2)
// Of each set of lanes: which they are, in order. AVX2 has no instruction that moves the lanes of a mask to the front.
struct Lanes {
  uint8_t of[256][8] = {};
  constexpr Lanes() {
    for (int mask = 0; mask < 256; mask++)
      for (int lane = 0, to = 0; lane < 8; lane++)
        if (mask >> lane & 1) of[mask][to++] = static_cast<uint8_t>(lane);
  }
};
constexpr Lanes kChosen;
#endif

// Moves candidates of low <= z < high to the front of another array, or of the same one; how many there are. Sixteen
// at the least are written: what is behind the last one is -inf, of weight 0.
int Keep(const float* z, const float* weight, int count, float low, float high, float* to_z, float* to_weight) {
  int kept = 0;
  for (int i = 0; i < count; i += kWide) {
#if defined(HEADRACE_ISA_AVX512)
    const Vec at = Load(z + i), w = Load(weight + i);
    const __mmask16 is_high = _mm512_cmp_ps_mask(at, Set1(low), _CMP_GE_OQ);
    const __mmask16 is_kept = _mm512_mask_cmp_ps_mask(is_high, at, Set1(high), _CMP_LT_OQ);
    Store(to_z + kept, _mm512_maskz_compress_ps(is_kept, at));
    Store(to_weight + kept, _mm512_maskz_compress_ps(is_kept, w));
    kept += __builtin_popcount(is_kept);
#elif defined(HEADRACE_ISA_AVX2)
    for (int j = i; j < i + kWide; j += kLanes) {
      const Vec at = Load(z + j), w = Load(weight + j);
      const Vec is_kept =
          _mm256_and_ps(_mm256_cmp_ps(at, Set1(low), _CMP_GE_OQ), _mm256_cmp_ps(at, Set1(high), _CMP_LT_OQ));
      const int mask = _mm256_movemask_ps(is_kept);
      const __m256i from =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kChosen.of[mask])));
      Store(to_z + kept, _mm256_permutevar8x32_ps(at, from));
      Store(to_weight + kept, _mm256_permutevar8x32_ps(w, from));
      kept += __builtin_popcount(static_cast<unsigned>(mask));
    }
#else
    for (int j = i; j < i + kWide; j++) {
      const float at = z[j], w = weight[j];
      to_z[kept] = at, to_weight[kept] = w;
      kept += static_cast<int>(at >= low) & static_cast<int>(at < high);  // no branch: there is no guessing it
    }
#endif
  }
  for (int j = kept; j < (kept + kWide - 1) / kWide * kWide; j++) to_z[j] = -kInfinity, to_weight[j] = 0;
  return kept;
}

struct Candidates {
  const float *z, *weight;
  int count;
  float *room_z, *room_weight;  // may be the same
};

// Key of the largest cut, from `low` on, above which candidates weigh (or are) as much as wanted; `low` where none do.
// Each turn tries some cuts and leaves out what does not lie between two of them; at most 14 of them.
template <bool kCounts>
int32_t LargestCut(Candidates from, float wanted, int32_t low) {
  int32_t high = 1;     // less than wanted from here on
  float above = 0;      // of candidates from `high` on
  bool is_first = true;
  while (high - low > 1) {
    int32_t key[kCuts];
    float cut[kCuts], sums[kCuts];
    if (is_first && low == kLowest) {
      // -14, -8, -4, -1.5: what most cuts of language models lie between.
      key[0] = -0x41600000, key[1] = -0x41000000, key[2] = -0x40800000, key[3] = -0x3fc00000;
    } else {
      const int64_t gap = static_cast<int64_t>(high) - low;
      for (int c = 0; c < kCuts; c++) {
        const int64_t step = gap * (c + 1) / (kCuts + 1);
        key[c] = static_cast<int32_t>(low + (step > 1 ? step : 1));
      }
    }
    is_first = false;
    for (int c = 0; c < kCuts; c++) cut[c] = ValueOf(key[c]);
    SumsAbove<kCounts>(from.z, from.weight, from.count, cut, sums);
    float next_above = above;
    for (int c = kCuts - 1; c >= 0; c--) {
      const float sum = above + sums[c];
      if (kCounts && sum == wanted) return key[c];  // a larger cut keeps the same
      if (sum >= wanted) {
        low = key[c];
        break;
      }
      high = key[c], next_above = sum;
    }
    above = next_above;
    const float end = high > 0 ? kInfinity : ValueOf(high);
    from.count = Keep(from.z, from.weight, from.count, ValueOf(low), end, from.room_z, from.room_weight);
    from.z = from.room_z, from.weight = from.room_weight;
  }
  return low;
}

struct Scaled {
  const float* x;
  int size;
  float best, temperature;
  Vec Z(const float* at) const { return Div(Sub(Load(at), Set1(best)), Set1(temperature)); }
};

// Lane sums of the weights of z >= cut; z and weight are kept where there is room for them. z: as written before.
template <bool kIsKept>
void LaneSums(const Scaled& row, float cut, float* z, float* weight, double* sums) {
  float tail[kWide];
  const Vec zero = Set1(0), least = Set1(cut);
  for (int j = 0; j < kPlaces; j++) sums[j] = 0;
  for (int first = 0; first < row.size; first += kStretch) {
    alignas(64) float part[kPlaces] = {};
    for (int i = first; i < Least(row.size, first + kStretch); i += kWide) {
      const float* const at = SixteenAt(row.x, i, row.size, tail);
      float* const to = part + i % kPlaces;
      for (int p = 0; p < kParts; p++) {
        const Vec value = row.Z(at + p * kLanes), w = Exp(value);
        if (kIsKept) Store(z + i + p * kLanes, value), Store(weight + i + p * kLanes, w);
        Store(to + p * kLanes, Add(Load(to + p * kLanes), WhereLess(value, least, zero, w)));
      }
    }
    for (int j = 0; j < kPlaces; j++) sums[j] += part[j];
  }
}

// The same from z and weights that are there.
void LaneSumsAgain(const float* z, const float* weight, int size, float cut, double* sums) {
  const Vec zero = Set1(0), least = Set1(cut);
  for (int j = 0; j < kPlaces; j++) sums[j] = 0;
  for (int first = 0; first < size; first += kStretch) {
    alignas(64) float part[kPlaces] = {};
    for (int i = first; i < Least(size, first + kStretch); i += kWide) {
      float* const to = part + i % kPlaces;
      for (int p = 0; p < kParts; p++) {
        const int o = p * kLanes;
        Store(to + o, Add(Load(to + o), WhereLess(Load(z + i + o), least, zero, Load(weight + i + o))));
      }
    }
    for (int j = 0; j < kPlaces; j++) sums[j] += part[j];
  }
}

// First index of positive weight whose cumulative weight is above the target, or the last one of positive weight;
// target: becomes what is left of it there.
template <class Number>
int Pick(const Number* weight, int count, double* target) {
  double sum = 0, before = 0;
  int found = 0;
  for (int i = 0; i < count; i++) {
    if (!(weight[i] > 0)) continue;
    found = i, before = sum, sum += weight[i];
    if (sum > *target) break;
  }
  *target = *target > before ? *target - before : 0;
  return found;
}

// The id at `uniform` of the cumulative weights of z >= cut, in the order of (id modulo lanes, id).
int32_t Invert(const Scaled& row, float cut, const double* place_sums, float uniform, float* room) {
  int lanes = kPlaces;
  while (row.size % lanes) lanes /= 2;
  double sums[kPlaces] = {}, total = 0;
  for (int j = 0; j < kPlaces; j++) sums[j % lanes] += place_sums[j];
  for (int j = 0; j < lanes; j++) total += sums[j];
  double target = uniform * total;
  const int lane = Pick(sums, lanes, &target), count = row.size / lanes;
  const Vec zero = Set1(0), least = Set1(cut);
  float tail[kWide];
  for (int i = 0; i < count; i++) room[i] = row.x[i * lanes + lane];
  for (int i = 0; i < count; i += kWide) {
    const float* const at = SixteenAt(room, i, count, tail);
    Vec weight[kParts];
    for (int p = 0; p < kParts; p++) {
      const Vec value = row.Z(at + p * kLanes);
      weight[p] = WhereLess(value, least, zero, Exp(value));
    }
    for (int p = 0; p < kParts; p++) Store(room + i + p * kLanes, weight[p]);
  }
  return Pick(room, count, &target) * lanes + lane;
}

double Total(const double* sums) {
  double total = 0;
  for (int j = 0; j < kPlaces; j++) total += sums[j];
  return total;
}

Choice Choose(const Row& row, float* room) {
  float best;
  Choice choice = Best(row.logits, row.size, &best);
  if (!(row.temperature > 0) || !(best > -kInfinity) || !(best < kInfinity)) return choice;
  const Scaled scaled{row.logits, row.size, best, row.temperature};
  const int padded = (row.size + kWide - 1) / kWide * kWide;
  const bool has_k = row.top_k > 0 && row.top_k < row.size, has_p = row.top_p < 1;
  double sums[kPlaces];
  float cut = row.floor;
  if (!has_k && !has_p) {
    LaneSums<false>(scaled, cut, nullptr, nullptr, sums);
  } else {
    float *z = room, *weight = z + padded, *room_z = weight + padded, *room_weight = room_z + padded;
    LaneSums<true>(scaled, -kInfinity, z, weight, sums);
    Candidates all{z, weight, row.size, room_z, room_weight};
    float mass = static_cast<float>(Total(sums));
    int32_t key = kLowest;
    if (has_k) key = LargestCut<true>(all, static_cast<float>(row.top_k), kLowest);
    if (has_p) {
      if (key > kLowest) {
        all.count = Keep(z, weight, row.size, ValueOf(key), kInfinity, room_z, room_weight);
        all.z = room_z, all.weight = room_weight;
        const float everything[kCuts] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
        float masses[kCuts];
        SumsAbove<false>(all.z, all.weight, all.count, everything, masses);
        mass = masses[0];
      }
      key = LargestCut<false>(all, row.top_p * mass, key);
    }
    cut = ValueOf(key) > cut ? ValueOf(key) : cut;
    LaneSumsAgain(z, weight, row.size, cut, sums);
  }
  if (!(Total(sums) > 0)) return choice;  // NaN
  choice.token = Invert(scaled, cut, sums, row.uniform, room);
  return choice;
}

}  // namespace

const sample::DrawTable& GetDrawTable() {
  static constexpr sample::DrawTable table{Choose};
  return table;
}

}  // namespace headrace::HEADRACE_ISA
