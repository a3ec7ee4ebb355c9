// Attention of one token over the slots that it sees.
//
// The visible slots are numbered in the order of their tokens' positions, 0, 1, 2, ..., wherever in the KV cache they
// lie. All sums go by these numbers, or in a layer with a window, where the first visible position is not 0, by position.
// So a token's result has the same bits as a tree node beside others and in plain decoding, where its ancestors lie in
// other slots.
#pragma once
#include <cmath>
#include <vector>

#include "cache.h"

// Visible positions: first to end - 1. Those before `straight` are in the slots of their own numbers plus `shift`, the others
// in the slots of `more`.
struct Seen {
  long first = 0, end = 0, straight = 0, shift = 0;
  std::vector<long> more;
  long base() const { return first / LANES * LANES; }  // where sums begin: their order goes by positions modulo 16
  long size() const { return end - base(); }
  long slot(long position) const { return position < straight ? position + shift : more[position - straight]; }
  long reach() const {  // no slot is behind it
    long most = straight + shift;
    for (long slot : more) most = slot < most ? most : slot + 1;
    return most;
  }
  void add(long slot) {
    if (more.empty() && slot == end + shift) straight++;
    else more.push_back(slot);
    end++;
  }
};

constexpr long QUERIES = 4;                  // heads of a token that share one read of a key
constexpr int WIDE = PARTS == 1 ? 4 : 2;  // vectors of a value that are summed at once

// Numbers d to d + 16 · COUNT of every query's result: weights times values, added in the order of the slots.
template <int Q, int COUNT, typename Number>
INLINE void add_values(const Number* values, long size, const Seen& seen, const float* weights, long room,
                       const float* by, float* const* out, long d) {
  vec found[Q][COUNT];
  for (int h = 0; h < Q; h++)
    for (int c = 0; c < COUNT; c++) found[h][c] = zero();
  const long base = seen.base();
  for (long p = seen.first; p < seen.end; p++) {
    const Slot<Number> value(values, seen.slot(p), size);
    for (int h = 0; h < Q; h++) {
      const vec weight = all(weights[h * room + p - base]);
      for (int c = 0; c < COUNT; c++) found[h][c] = fma(value(d + c * LANES), weight, found[h][c]);
    }
  }
  for (int h = 0; h < Q; h++)
    for (int c = 0; c < COUNT; c++) store(out[h] + d + c * LANES, found[h][c] * all(by[h]));
}

template <int Q, typename Number>
static void attend(const float* const* q, const Number* keys, const Number* values, long size, const Seen& seen,
                   float scale, float* scores, long room, float* const* out) {
  const long base = seen.base(), skipped = seen.first - base, total = seen.size();
  for (long s = 0; s < total; s += LANES) {
    vec dot[Q][LANES];
    long count = total - s < LANES ? total - s : LANES;
    for (long i = 0; i < LANES; i++) {
      const long p = base + (i < count ? s + i : s), slot = seen.slot(p < seen.first ? seen.first : p);
      const Slot<Number> key(keys, slot, size);
      prefetch(values, slot, size);
      vec own[Q];
      for (int h = 0; h < Q; h++) own[h] = zero();
      for (long d = 0; d < size; d += LANES) {
        vec k = key(d);
        for (int h = 0; h < Q; h++) own[h] = fma(load(q[h] + d), k, own[h]);
      }
      for (int h = 0; h < Q; h++) dot[h][i] = own[h];
    }
    for (int h = 0; h < Q; h++) store(scores + h * room + s, sums(dot[h]) * all(scale));
  }
  float by[Q];
  for (int h = 0; h < Q; h++) {
    float* own = scores + h * room;
    for (long s = 0; s < skipped; s++) own[s] = -INFINITY;
    for (long s = total; s % LANES; s++) own[s] = -INFINITY;
    vec most = load(own);
    for (long s = LANES; s < total; s += LANES) most = max(most, load(own + s));
    const vec peak = all(top(most));
    vec weight = zero();
    for (long s = 0; s < total; s += LANES) {
      vec e = exp(load(own + s) - peak);
      store(own + s, e);
      for (long i = s; i < skipped; i++) own[i] = 0;
      for (long i = total - s; i < LANES; i++) own[s + i] = 0;
      weight = weight + load(own + s);
    }
    by[h] = 1.0f / sum(weight);
  }
  long d = 0;
  for (; d + WIDE * LANES <= size; d += WIDE * LANES) add_values<Q, WIDE>(values, size, seen, scores, room, by, out, d);
  for (; d < size; d += LANES) add_values<Q, 1>(values, size, seen, scores, room, by, out, d);
}

// `heads` queries (heads, size) of one token and one key head -> out (heads, size). `scores` has room for QUERIES rows.
template <typename Number>
static void attend_heads(const float* q, const Number* keys, const Number* values, long heads, long size,
                         const Seen& seen, float scale, float* scores, long room, float* out) {
  for (long from = 0; from < heads; from += QUERIES) {
    const float* queries[QUERIES];
    float* to[QUERIES];
    long count = heads - from < QUERIES ? heads - from : QUERIES;
    for (long h = 0; h < count; h++) queries[h] = q + (from + h) * size, to[h] = out + (from + h) * size;
    switch (count) {
      case 1: attend<1>(queries, keys, values, size, seen, scale, scores, room, to); break;
      case 2: attend<2>(queries, keys, values, size, seen, scale, scores, room, to); break;
      case 3: attend<3>(queries, keys, values, size, seen, scale, scores, room, to); break;
      case 4: attend<4>(queries, keys, values, size, seen, scale, scores, room, to); break;
    }
  }
}
