// Products: each weight is read and unpacked once for a few tokens.
#include "product.h"

#include "rounded.h"

constexpr long AHEAD = 2048;  // bytes that memory is asked for in advance

// The sums of the even and of the odd inputs of a tile grow apart: two chains of additions for each token, not one.
// `x` and `totals` belong to the first of these tokens among `among`.
template <typename F, int TOKENS>
static void some(const typename F::Tile* tile, long tiles, const float* x, const float* totals, long among, float* y) {
  constexpr long LINES = (sizeof(typename F::Tile) + 63) / 64, HALVES = F::INPUTS / LANES;
  vec sum[TOKENS];
#pragma GCC unroll 16
  for (int t = 0; t < TOKENS; t++) sum[t] = zero();
  for (long b = 0; b < tiles; b++, tile++) {
    for (long i = 0; i < LINES; i++) __builtin_prefetch((const char*)tile + AHEAD + 64 * i);
    const long half = b * HALVES;
    const float *own = x + half / 2 * among * TILE + half % 2 * LANES, *total = totals + half / 2 * among * 2 + half % 2;
    vec even[TOKENS], odd[TOKENS];
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++) even[t] = odd[t] = zero();
#pragma GCC unroll 4
    for (long c = 0; c < F::WORDS; c++) {
      auto word = F::word(*tile, c);
#pragma GCC unroll 8
      for (int i = 0; i < F::EACH_WORD; i += 2) {
        vec w = F::weight(word, i), v = F::weight(word, i + 1);
#if defined(__aarch64__)  // GCC would unpack a whole tile first, and keep it in memory
        settle(w), settle(v);
#endif
#pragma GCC unroll 16
        for (int t = 0; t < TOKENS; t++) {
          const float* at = own + t * TILE + c * F::EACH_WORD + i;
          even[t] = fma(w, all(at[0]), even[t]);
          odd[t] = fma(v, all(at[1]), odd[t]);
        }
      }
    }
    const By by = F::by(*tile);
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; t++) sum[t] = F::add(by, even[t] + odd[t], total + 2 * t, sum[t]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < TOKENS; t++) store(y + t * LANES, sum[t]);
}

template <typename F>
static void every(const Matrix& m, long group, const Rows& input, Span tokens, float* y) {
  const auto* tile = (const typename F::Tile*)m.data + group * m.tiles;
  long count = tokens.to - tokens.from;
  for (long i = 0; i < blocks(count); i++) {
    Span own = block(count, i);
    const float *x = &input.x[(tokens.from + own.from) * TILE], *totals = &input.totals[(tokens.from + own.from) * 2];
    float* out = y + own.from * LANES;
    switch (own.to - own.from) {
#define CASE(N) case N: some<F, N>(tile, m.tiles, x, totals, input.tokens, out); break;
      FOR_EACH_COUNT(CASE)
#undef CASE
    }
  }
}

static void one(const Matrix& m, long group, const Rows& input, Span tokens, float* y) {
  if (input.bits && is_quantised(m)) return (input.bits == 8 ? product8 : product16)(m, group, input, tokens, y);
  switch (m.format) {
    FOR_QUANTISED(every<F>(m, group, input, tokens, y);)
    FOR_FLOATS(every<F>(m, group, input, tokens, y);)
  }
}

void product(const Matrix& m, long group, long count, const Rows& input, Span tokens, float* y) {
#if defined(__AMX_TILE__)
  if (input.digits && is_quantised(m)) return product_amx(m, group, count, input, tokens, y);
#endif
  for (long i = 0; i < count; i++) one(m, group + i, input, tokens, y + i * (tokens.to - tokens.from) * LANES);
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
