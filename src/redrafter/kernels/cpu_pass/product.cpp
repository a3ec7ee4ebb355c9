// Products: each weight is read and unpacked once for a few tokens.
#include "product.h"

// Tokens whose sums fit into registers: two vectors for each, and some for weights.
#if defined(__AVX512F__)
constexpr int MOST = 8;
#elif !defined(PORTABLE)
constexpr int MOST = 4;
#else
constexpr int MOST = 2;
#endif
constexpr long AHEAD = 2048;  // bytes that memory is asked for in advance

// The sums of the even and of the odd inputs of a tile grow apart: two chains of additions for each token, not one.
// `x` and `totals` belong to the first of these tokens among `among`.
template <typename F, int TOKENS>
static void some(const typename F::Tile* tile, long tiles, const float* x, const float* totals, long among, float* y) {
  constexpr long LINES = (sizeof(typename F::Tile) + 63) / 64, HALVES = F::INPUTS / LANES;
  vec sum[TOKENS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++) sum[t] = zero();
  for (long b = 0; b < tiles; b++, tile++) {
    for (long i = 0; i < LINES; i++) __builtin_prefetch((const char*)tile + AHEAD + 64 * i);
    const long half = b * HALVES;
    const float *own = x + half / 2 * among * TILE + half % 2 * LANES, *total = totals + half / 2 * among * 2 + half % 2;
    vec even[TOKENS], odd[TOKENS];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) even[t] = odd[t] = zero();
#pragma GCC unroll 4
    for (long c = 0; c < F::WORDS; c++) {
      auto word = F::word(*tile, c);
#pragma GCC unroll 8
      for (int i = 0; i < F::EACH_WORD; i += 2) {
        vec w = F::weight(word, i), v = F::weight(word, i + 1);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
          const float* at = own + t * TILE + c * F::EACH_WORD + i;
          even[t] = fma(w, all(at[0]), even[t]);
          odd[t] = fma(v, all(at[1]), odd[t]);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++)
      sum[t] = F::add(*tile, even[t] + odd[t], HALVES == 1 ? total[2 * t] : total[2 * t] + total[2 * t + 1], sum[t]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++) store(y + t * LANES, sum[t]);
}

template <typename F>
static void every(const Matrix& m, long group, const Rows& input, float* y) {
  const auto* tile = (const typename F::Tile*)m.data + group * m.tiles;
  // Parts of nearly the same size: nine tokens are five and four, not eight and one.
  long tokens = input.tokens, parts = (tokens + MOST - 1) / MOST;
  for (long p = 0; p < parts; p++) {
    long from = tokens * p / parts, count = tokens * (p + 1) / parts - from;
    const float *x = &input.x[from * TILE], *totals = &input.totals[from * 2];
    float* out = y + from * LANES;
    switch (count) {
#define CASE(N) case N: some<F, N>(tile, m.tiles, x, totals, tokens, out); break;
      CASE(1) CASE(2)
#if !defined(PORTABLE)
      CASE(3) CASE(4)
#endif
#if defined(__AVX512F__)
      CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
    }
  }
}

void product(const Matrix& m, long group, const Rows& input, float* y) {
  switch (m.format) {
    FOR_QUANTISED(every<F>(m, group, input, y);)
    FOR_FLOATS(every<F>(m, group, input, y);)
  }
}

template <typename F>
static void unpack_row(const Matrix& m, long row, float* y) {
  const auto* tile = (const typename F::Tile*)m.data + row / LANES * m.tiles;
  for (long k = 0; k < m.columns; k++) y[k] = F::value(tile[k / F::INPUTS], row % LANES, k % F::INPUTS);
}

void matrix_row(const Matrix& m, long row, float* y) {
  switch (m.format) {
    FOR_QUANTISED(unpack_row<F>(m, row, y);)
    FOR_FLOATS(unpack_row<F>(m, row, y);)
  }
}
