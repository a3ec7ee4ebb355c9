// A few rows of weights times a few rows of x, with all sums in registers.
#pragma once
#include "simd.h"

constexpr long ROWS = 4;  // weight rows at a time: enough independent sums to hide the latency of an addition
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr long TOKENS = 6;  // ROWS · TOKENS sums fit into 32 vector registers
#else
constexpr long TOKENS = 3;  // sums for 16 registers
#endif
constexpr long AHEAD = 1;  // groups of rows to prefetch ahead

constexpr long QUAD = 4 * LANES;  // int8 weights in a vector

// R rows of weights times T rows of x.
template <long R, long T>
static inline void tile(const float* x, long x_step, const float* w, long in, float (&y)[R][T]) {
  vec acc[R][T] = {};
  long k = 0;
  for (; k + LANES <= in; k += LANES) {
    vec row[R];
    for (long r = 0; r < R; r++) {
      row[r] = load(w + r * in + k);
      __builtin_prefetch(w + (r + AHEAD * R) * in + k);
    }
    for (long t = 0; t < T; t++) {
      vec token = load(x + t * x_step + k);
      for (long r = 0; r < R; r++) acc[r][t] += row[r] * token;
    }
  }
  if (k < in) {
    vec row[R];
    for (long r = 0; r < R; r++) row[r] = load_part(w + r * in + k, in - k);
    for (long t = 0; t < T; t++) {
      vec token = load_part(x + t * x_step + k, in - k);
      for (long r = 0; r < R; r++) acc[r][t] += row[r] * token;
    }
  }
  for (long r = 0; r < R; r++)
    for (long t = 0; t < T; t++) y[r][t] = sum(acc[r][t]);
}

template <long R, long T>
static inline void add_quads(const float* x, long x_step, const ivec (&quads)[R], vec (&acc)[R][T]) {
  for (long j = 0; j < 4; j++) {
    vec row[R];
    for (long r = 0; r < R; r++) row[r] = __builtin_convertvector((quads[r] << (24 - 8 * j)) >> 24, vec);
    for (long t = 0; t < T; t++) {
      vec token = load(x + t * x_step + j * LANES);
      for (long r = 0; r < R; r++) acc[r][t] += row[r] * token;
    }
  }
}

// The same with int8 weights. Four weights fill a 32-bit lane, and shifts extract one after another. x must be in the
// order of `by_lane`, padded with zeros to a multiple of QUAD.
template <long R, long T>
static inline void tile(const float* x, long x_step, const int8_t* w, long in, float (&y)[R][T]) {
  vec acc[R][T] = {};
  ivec quads[R] = {};
  long k = 0;
  for (; k + QUAD <= in; k += QUAD) {
    for (long r = 0; r < R; r++) {
      memcpy(&quads[r], w + r * in + k, QUAD);
      __builtin_prefetch(w + (r + AHEAD * R) * in + k);
    }
    add_quads<R, T>(x + k, x_step, quads, acc);
  }
  if (k < in) {
    for (long r = 0; r < R; r++) {
      quads[r] = ivec{};
      memcpy(&quads[r], w + r * in + k, in - k);
    }
    add_quads<R, T>(x + k, x_step, quads, acc);
  }
  for (long r = 0; r < R; r++)
    for (long t = 0; t < T; t++) y[r][t] = sum(acc[r][t]);
}

// Reorders x for int8 weights, (n, in) -> (n, padded): in each run of QUAD numbers, numbers 0, 4, 8, ... come first,
// then 1, 5, 9, ..., and so on.
static inline void by_lane(const float* x, float* y, long n, long in, long padded) {
  for (long t = 0; t < n; t++)
    for (long k = 0; k < padded; k++) {
      long from = k / QUAD * QUAD + k % LANES * 4 + k % QUAD / LANES;
      y[t * padded + k] = from < in ? x[t * in + from] : 0.0f;
    }
}
