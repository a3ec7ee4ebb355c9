// Attention of neighbouring tokens of a row, nodes of a tree or a prompt's: a vector's lanes are pairs of a token and one of
// the heads that share a key head, so each key and each value is read once for all of them. Every sum has the order that
// attention.h gives it for one token.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"

constexpr long ROWS = 16;                    // keys or values that are read at once; they stay in the L1 cache
constexpr int KEYS = PARTS == 1 ? 4 : 2;     // that are scored at once
constexpr int VALUED = 4;                    // pairs whose values are summed at once
constexpr int COLUMNS = PARTS == 1 ? 4 : 1;  // vectors of a value, whose sums fit into registers
constexpr long DETOUR = 64;                  // slots that are scored though no position has their number

struct Pair {
  float* q;  // the query, which the result replaces
  const Seen* seen;
};

// Whether joint attention can serve a token: its keys are in slots at or behind their positions, and not far behind.
static bool joins(const Seen& seen) {
  for (long p = seen.straight; p < seen.end; p++)
    if (seen.slot(p) < p) return false;
  return seen.shift == 0 && seen.reach() <= seen.end + DETOUR;
}

// Rows `slot` to `slot + count` of a KV cache in fp32.
static inline const float* widened(const float* cache, long slot, long, long size, float*) { return cache + slot * size; }
template <typename Number>
static const float* widened(const Number* cache, long slot, long count, long size, float* room) {
  for (long s = 0; s < count; s++) {
    const Slot<Number> one(cache, slot + s, size);
    for (long d = 0; d < size; d += LANES) store(room + s * size + d, one(d));
  }
  return room;
}

struct Dots {
  vec of[KEYS];
};

// The sum of products j, j + STEP, j + 2 · STEP, ... below `size`, in the order of `sum`: lane by lane, then in pairs.
template <int STEP>
INLINE Dots dots(const float* q, const float* const* keys, long size, long j) {
  Dots made;
  if constexpr (STEP == LANES) {
    for (int k = 0; k < KEYS; k++) made.of[k] = zero();
    for (long d = j; d < size; d += LANES) {
      vec own = load(q + d * LANES);
      settle(own);
      for (int k = 0; k < KEYS; k++) made.of[k] = fma(own, all(keys[k][d]), made.of[k]);
    }
  } else {
    made = dots<2 * STEP>(q, keys, size, j);
    const Dots others = dots<2 * STEP>(q, keys, size, j + STEP);
    for (int k = 0; k < KEYS; k++) {
      made.of[k] = made.of[k] + others.of[k];
      settle(made.of[k]);
    }
  }
  return made;
}

// Scores (keys, pairs) of `count` keys. SIZE: the size of a head that loops are unrolled for; 0: any.
template <long SIZE>
static void score(const float* q, const float* keys, long any_size, long count, float scale, float* scores) {
  const long size = SIZE ? SIZE : any_size;
  for (long s = 0; s < count; s += KEYS) {
    const float* own[KEYS];
    for (long k = 0; k < KEYS; k++) own[k] = keys + std::min(s + k, count - 1) * size;
    const Dots made = dots<1>(q, own, size, 0);
    for (long k = 0; k < KEYS && s + k < count; k++) store(scores + (s + k) * LANES, made.of[k] * all(scale));
  }
}

// Scores (rows, pairs) -> weights, and 1 / their sum. Rows are a multiple of 16.
static void weigh(float* scores, long rows, float* by) {
  vec most = load(scores), sums[LANES];
  for (long s = 1; s < rows; s++) most = max(most, load(scores + s * LANES));
  for (long i = 0; i < LANES; i++) sums[i] = zero();
  for (long s = 0; s < rows; s += LANES)
    for (long i = 0; i < LANES; i++) {
      float* own = scores + (s + i) * LANES;
      vec score = load(own), e = exp(score - most);
      EACH e.part[i] = score.part[i] == -INFINITY ? floats{} : e.part[i];
      store(own, e);
      sums[i] = sums[i] + e;
    }
  for (long half = LANES / 2; half; half /= 2)
    for (long i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
  store(by, all(1.0f) / sums[0]);
}

// Adds values d to d + 16 · COUNT of some rows, times weights (rows, 16), for VALUED pairs.
template <int COUNT>
static void add_shared(const float* weights, const float* values, long size, long rows, float* const* out, long d) {
  vec sum[VALUED][COUNT];
  for (int t = 0; t < VALUED; t++)
    for (int c = 0; c < COUNT; c++) sum[t][c] = load(out[t] + d + c * LANES);
  for (long s = 0; s < rows; s++, weights += LANES) {
    vec v[COUNT];
    for (int c = 0; c < COUNT; c++) v[c] = load(values + s * size + d + c * LANES);
    for (int t = 0; t < VALUED; t++) {
      vec weight = all(weights[t]);
      settle(weight);
      for (int c = 0; c < COUNT; c++) sum[t][c] = fma(v[c], weight, sum[t][c]);
    }
  }
  for (int t = 0; t < VALUED; t++)
    for (int c = 0; c < COUNT; c++) store(out[t] + d + c * LANES, sum[t][c]);
}

// Numbers of scratch memory for pairs that see slots below `reach`.
INLINE long joint_room(long reach, long size) { return LANES * (reach + 2 * LANES) + (LANES + ROWS + 1) * size; }

// The results of `count` <= 16 pairs of one row and one key head.
template <typename Number>
static void attend_pairs(const Pair* pairs, long count, const Number* keys, const Number* values, long size, float scale,
                         float* room) {
  float by[LANES], *out[LANES + VALUED], *turned = room, *some = turned + LANES * size, *unused = some + ROWS * size,
        *scores = unused + size;
  // All pairs see positions `from` to `to`, in the slots of these numbers. Each pair adds other values for itself, so that it
  // never reads one that its token does not see: what is no number would stay none with a weight of 0.
  long begin = pairs[0].seen->first, end = 0, reach = 0, from = 0, to = pairs[0].seen->straight;
  for (long i = 0; i < LANES; i++) {
    const Pair& own = pairs[std::min(i, count - 1)];
    for (long d = 0; d < size; d++) turned[d * LANES + i] = own.q[d];
    begin = std::min(begin, own.seen->first), end = std::max(end, own.seen->end);
    reach = std::max(reach, own.seen->reach());
    from = std::max(from, own.seen->first), to = std::min(to, own.seen->straight);
  }
  if (to < from) from = to = begin;
  const long base = begin / LANES * LANES, rows = (end - base + LANES - 1) / LANES * LANES;
  float* const of_position = scores - base * LANES;
  for (long s = begin; s < reach; s += ROWS) {
    const long some_count = std::min(ROWS, reach - s);
    const float* own = widened(keys, s, some_count, size, some);
    float* const into = of_position + s * LANES;
    for (long i = s; i < s + some_count; i++) prefetch(values, i, size);
    switch (size) {
      case 64: score<64>(turned, own, size, some_count, scale, into); break;
      case 128: score<128>(turned, own, size, some_count, scale, into); break;
      default: score<0>(turned, own, size, some_count, scale, into);
    }
  }
  for (long i = 0; i < LANES; i++) {
    const Seen& seen = *pairs[std::min(i, count - 1)].seen;
    // Scores in the order of slots become those of positions. No slot is before its position, so none is overwritten unread.
    for (long p = seen.straight; p < seen.end; p++) of_position[p * LANES + i] = of_position[seen.slot(p) * LANES + i];
    for (long p = base; p < seen.first; p++) of_position[p * LANES + i] = -INFINITY;
    for (long p = seen.end; p < base + rows; p++) of_position[p * LANES + i] = -INFINITY;
  }
  weigh(scores, rows, by);

  // Weights times values of positions `first` to `last`, for one pair; then the factor `times`.
  auto add_alone = [&](long i, long first, long last, float times) {
    const Seen& seen = *pairs[i].seen;
    for (long d = 0; d < size; d += LANES) {
      vec sum = load(out[i] + d);
      for (long p = first; p < last; p++)
        sum = fma(Slot<Number>(values, seen.slot(p), size)(d), all(of_position[p * LANES + i]), sum);
      store(out[i] + d, sum * all(times));
    }
  };
  for (long i = 0; i < count; i++) {
    out[i] = pairs[i].q;
    memset(out[i], 0, size * sizeof(float));
    add_alone(i, pairs[i].seen->first, from, 1.0f);
  }
  for (long i = count; i < count + VALUED; i++) out[i] = unused;
  memset(unused, 0, size * sizeof(float));
  for (long s = from; s < to; s += ROWS) {
    const long some_count = std::min(ROWS, to - s);
    const float* own = widened(values, s, some_count, size, some);
    for (long i = 0; i < count; i += VALUED) {
      const float* weights = of_position + s * LANES + i;
      long d = 0;
      for (; d + COLUMNS * LANES <= size; d += COLUMNS * LANES)
        add_shared<COLUMNS>(weights, own, size, some_count, out + i, d);
      for (; d < size; d += LANES) add_shared<1>(weights, own, size, some_count, out + i, d);
    }
  }
  for (long i = 0; i < count; i++) add_alone(i, std::max(to, pairs[i].seen->first), pairs[i].seen->end, by[i]);
}
