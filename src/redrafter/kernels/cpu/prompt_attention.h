// Attention of many neighbouring tokens of a prompt: a vector's lanes are tokens, so each key and each value is read once
// for all of them. Every sum has the order that attention.h gives it for one token.
#pragma once
#include <cmath>

#include "attention.h"

constexpr long TOGETHER = 2 * LANES;               // tokens
constexpr int COLUMNS = PARTS == 1 ? 2 : 1;        // vectors of tokens, or of a value, whose sums fit into registers
constexpr int VALUED = PARTS == 1 ? 8 : 4;         // tokens whose values are summed at once

struct Dots {  // of two keys with COLUMNS vectors of tokens
  vec of[2][COLUMNS];
};

// The sum of products j, j + STEP, j + 2 · STEP, ... below `size`, in the order of `sum`: lane by lane, then in pairs.
template <int STEP>
INLINE Dots dots(const float* q, const float* one, const float* two, long size, long j) {
  Dots made;
  if constexpr (STEP == LANES) {
    for (int c = 0; c < COLUMNS; c++) made.of[0][c] = made.of[1][c] = zero();
    for (long d = j; d < size; d += LANES)
      for (int c = 0; c < COLUMNS; c++) {
        vec own = load(q + d * TOGETHER + c * LANES);
        settle(own);
        made.of[0][c] = fma(own, all(one[d]), made.of[0][c]);
        made.of[1][c] = fma(own, all(two[d]), made.of[1][c]);
      }
  } else {
    made = dots<2 * STEP>(q, one, two, size, j);
    Dots others = dots<2 * STEP>(q, one, two, size, j + STEP);
    for (int k = 0; k < 2; k++)
      for (int c = 0; c < COLUMNS; c++) {
        made.of[k][c] = made.of[k][c] + others.of[k][c];
        settle(made.of[k][c]);
      }
  }
  return made;
}

// Scores (keys, tokens) of keys `from` to `to`. SIZE: the size of a head that loops are unrolled for; 0: any.
template <long SIZE>
static void score(const float* q, const float* keys, long any_size, long from, long to, float scale, float* scores) {
  const long size = SIZE ? SIZE : any_size;
  for (long s = from; s < to; s += 2)
    for (long t = 0; t < TOGETHER; t += COLUMNS * LANES) {
      const float *one = keys + s * size, *two = s + 1 < to ? one + size : one;
      Dots made = dots<1>(q + t, one, two, size, 0);
      for (int k = 0; k < 2; k++)
        for (int c = 0; c < COLUMNS; c++)
          store(scores + (s - from + k) * TOGETHER + t + c * LANES, made.of[k][c] * all(scale));
    }
}

// Scores (rows, tokens) of one vector of tokens -> weights, and 1 / their sum. Rows are a multiple of 16.
static void weigh(float* scores, long rows, float* by) {
  vec most = load(scores), sums[LANES];
  for (long s = 1; s < rows; s++) most = max(most, load(scores + s * TOGETHER));
  for (long i = 0; i < LANES; i++) sums[i] = zero();
  for (long s = 0; s < rows; s += LANES)
    for (long i = 0; i < LANES; i++) {
      float* own = scores + (s + i) * TOGETHER;
      vec score = load(own), e = exp(score - most);
      EACH e.part[i] = score.part[i] == -INFINITY ? floats{} : e.part[i];
      store(own, e);
      sums[i] = sums[i] + e;
    }
  for (long width = LANES / 2; width; width /= 2)
    for (long i = 0; i < width; i++) sums[i] = sums[i] + sums[i + width];
  store(by, all(1.0f) / sums[0]);
}

// Values d to d + 16 · WIDE of VALUED tokens.
template <int WIDE>
static void add_values(const float* weights, const float* values, long size, long rows, const float* by, float* out) {
  vec sum[VALUED][WIDE];
#pragma GCC unroll 8
  for (int t = 0; t < VALUED; t++)
    for (int c = 0; c < WIDE; c++) sum[t][c] = zero();
  for (long s = 0; s < rows; s++, values += size, weights += TOGETHER) {
    vec v[WIDE];
    for (int c = 0; c < WIDE; c++) v[c] = load(values + c * LANES);
#pragma GCC unroll 8
    for (int t = 0; t < VALUED; t++) {
      vec weight = all(weights[t]);
      settle(weight);
      for (int c = 0; c < WIDE; c++) sum[t][c] = fma(v[c], weight, sum[t][c]);
    }
  }
  for (int t = 0; t < VALUED; t++)
    for (int c = 0; c < WIDE; c++) store(out + t * size + c * LANES, sum[t][c] * all(by[t]));
}

// Numbers of scratch memory for TOGETHER tokens that see `slots` slots or fewer, out included.
INLINE long prompt_room(long slots, long size) { return TOGETHER * (slots + 3 * LANES + 2 * size); }

// One head's queries of `count` <= TOGETHER tokens, `step` numbers apart; token t sees slots first[t] to last[t].
// Returns out (tokens, size), which lies in the scratch memory `room`.
static float* attend_prompt(const float* q, long step, long count, const float* keys, const float* values, long size,
                            const long* first, const long* last, float scale, float* room) {
  float by[TOGETHER], *turned = room, *out = turned + TOGETHER * size, *scores = out + TOGETHER * size;
  long from = first[0], to = last[0] + 1;
  for (long t = 0; t < TOGETHER; t++) {
    const float* own = q + (t < count ? t : count - 1) * step;
    for (long d = 0; d < size; d++) turned[d * TOGETHER + t] = own[d];
    if (t < count && first[t] < from) from = first[t];
    if (t < count && last[t] >= to) to = last[t] + 1;
  }
  from = from / LANES * LANES;
  long rows = (to - from + LANES - 1) / LANES * LANES;
  switch (size) {
    case 64: score<64>(turned, keys, size, from, to, scale, scores); break;
    case 128: score<128>(turned, keys, size, from, to, scale, scores); break;
    default: score<0>(turned, keys, size, from, to, scale, scores);
  }
  for (long t = 0; t < TOGETHER; t++) {
    long own = t < count ? t : count - 1;
    for (long s = from; s < first[own]; s++) scores[(s - from) * TOGETHER + t] = -INFINITY;
    for (long s = last[own] + 1; s < from + rows; s++) scores[(s - from) * TOGETHER + t] = -INFINITY;
  }
  for (long t = 0; t < TOGETHER; t += LANES) weigh(scores + t, rows, by + t);
  for (long t = 0; t < count; t += VALUED) {
    const float *weights = scores + t, *value = values + from * size;
    float* own = out + t * size;
    long d = 0;
    for (; d + COLUMNS * LANES <= size; d += COLUMNS * LANES)
      add_values<COLUMNS>(weights, value + d, size, to - from, by + t, own + d);
    for (; d < size; d += LANES) add_values<1>(weights, value + d, size, to - from, by + t, own + d);
  }
  return out;
}
