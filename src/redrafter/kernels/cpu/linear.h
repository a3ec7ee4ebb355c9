// Products with matrices of floats that lie row by row, as torch keeps them: y(n, out) = x(n, in) · W(out, in)^T for few
// rows of x. Each weight is read from memory once for all of them. The order of a sum does not depend on n.
#pragma once
#include "arithmetic.h"
#include "team.h"

struct Linear {
  const float *w, *bias;  // bias may be null
  float* y;
  long out;
};

// Rows of weights and of x at a time: their sums fit into registers, and there are enough of them to hide an addition's
// latency.
constexpr long ROWS = PARTS == 1 ? 4 : 2, TOKENS = PARTS == 1 ? 6 : 3;

template <bool WHOLE, long R, long T>
INLINE void add_products(vec (&sums)[R][T], const float* x, const float* w, long in, long k) {
  const auto read = [=](const float* row) { return WHOLE ? load(row + k) : load_part(row + k, in - k); };
  vec weights[R];
  for (long r = 0; r < R; r++) {
    weights[r] = read(w + r * in);
    __builtin_prefetch(w + (r + R) * in + k);  // the next rows
  }
  for (long t = 0; t < T; t++) {
    const vec own = read(x + t * in);
    for (long r = 0; r < R; r++) sums[r][t] = fma(weights[r], own, sums[r][t]);
  }
}

// R outputs, `row` and on, of T rows of x, `token` and on.
template <long R, long T>
static void some_outputs(const float* x, long in, const Linear& l, long row, long token) {
  vec sums[R][T];
  for (long r = 0; r < R; r++)
    for (long t = 0; t < T; t++) sums[r][t] = zero();
  const float *w = l.w + row * in, *own = x + token * in;
  long k = 0;
  for (; k + LANES <= in; k += LANES) add_products<true>(sums, own, w, in, k);
  if (k < in) add_products<false>(sums, own, w, in, k);
  for (long r = 0; r < R; r++)
    for (long t = 0; t < T; t++) l.y[(token + t) * l.out + row + r] = sum(sums[r][t]) + (l.bias ? l.bias[row + r] : 0.0f);
}

template <long R>
static void row_outputs(const float* x, long n, long in, const Linear& l, long row) {
  long parts = (n + TOKENS - 1) / TOKENS;
  for (long part = 0; part < parts; part++) {
    long from = n * part / parts, count = n * (part + 1) / parts - from;
    switch (count) {
      case 1: some_outputs<R, 1>(x, in, l, row, from); break;
      case 2: some_outputs<R, 2>(x, in, l, row, from); break;
      case 3: some_outputs<R, 3>(x, in, l, row, from); break;
#if defined(__AVX512F__)
      case 4: some_outputs<R, 4>(x, in, l, row, from); break;
      case 5: some_outputs<R, 5>(x, in, l, row, from); break;
      case 6: some_outputs<R, 6>(x, in, l, row, from); break;
#endif
    }
  }
}

// Outputs `from` to `to` of all rows of x.
static void outputs(const float* x, long n, long in, const Linear& l, long from, long to) {
  for (; from + ROWS <= to; from += ROWS) row_outputs<ROWS>(x, n, in, l, from);
  for (; from < to; from++) row_outputs<1>(x, n, in, l, from);
}
