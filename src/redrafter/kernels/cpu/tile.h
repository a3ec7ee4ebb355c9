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
