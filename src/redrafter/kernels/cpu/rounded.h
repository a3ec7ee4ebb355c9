// Products of rounded activations with quantised matrices: the sum of a tile's products is an integer.
#pragma once
#include "rows.h"

// 16 outputs of some tokens, as `product` gives them, for a quantised matrix and activations of 8 or 16 bits.
void product8(const Matrix& matrix, long group, const Rows& input, Span tokens, float* y);
void product16(const Matrix& matrix, long group, const Rows& input, Span tokens, float* y);

// The same for `count` neighbouring groups, where the input has digits: y (count, tokens, 16).
void product_amx(const Matrix& matrix, long group, long count, const Rows& input, Span tokens, float* y);

#if !defined(PORTABLE)  // where a product of integers takes several instructions, GCC would spend 10 s on unrolled loops
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif

// `x` belongs to the first of these tokens among `among`. Word by word for all tokens: the additions of one token wait for
// each other, those of several do not. W says how a tile's weights become words and what these are multiplied with.
template <typename W, typename F, int TOKENS, typename Rounded>
static void some(const typename F::Tile* tile, long tiles, const Rounded* x, long among, float* y) {
  constexpr long AHEAD = 2048;  // bytes that memory is asked for in advance
  vec sum[TOKENS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++) sum[t] = zero();
  for (long b = 0; b < tiles; b++, tile++) {
    for (size_t i = 0; i < sizeof(*tile); i += 64) __builtin_prefetch((const char*)tile + AHEAD + i);
    const long at = b * F::INPUTS, half = at % TILE / LANES;
    const Rounded* group = x + at / TILE * among;
    typename W::Sum part[TOKENS];
    UNROLL
    for (int c = 0; c < W::COUNT; c++) {
      const ivec word = W::word(*tile, c);
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; t++) part[t].add(word, W::numbers(group[t], half, c));
    }
    const By by = F::by(*tile);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      sum[t] = fma(to_floats(W::sum(part[t], group[t], half)) * all(group[t].scale), by.scale, sum[t]);
      if (F::HAS_MINIMUM) sum[t] = fma(by.least, all(group[t].total), sum[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++) store(y + t * LANES, sum[t]);
}

template <typename W, typename F, typename Rounded>
static void every(const Matrix& m, long group, const Rounded* x, long among, Span tokens, float* y) {
  const auto* tile = (const typename F::Tile*)m.data + group * m.tiles;
  long count = tokens.to - tokens.from;
  for (long i = 0; i < blocks(count); i++) {
    Span some_tokens = block(count, i);
    const Rounded* first = x + tokens.from + some_tokens.from;
    float* out = y + some_tokens.from * LANES;
    switch (some_tokens.to - some_tokens.from) {
#define CASE(N) case N: some<W, F, N>(tile, m.tiles, first, among, out); break;
      FOR_EACH_COUNT(CASE)
#undef CASE
    }
  }
}
