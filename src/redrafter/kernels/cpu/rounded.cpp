// Products of 8-bit activations with quantised matrices.
#include <cfloat>
#include <cmath>

#include "dots.h"
#include "rounded.h"

constexpr long AHEAD = 2048;  // bytes that memory is asked for in advance

// Of eight bytes the even ones, then the odd ones.
static uint64_t even_odd(uint64_t x) {
  constexpr uint64_t SECOND = 0x00ff00ff00ff00ff, HALF = 0x0000ffff0000ffff;
  uint64_t even = x & SECOND, odd = x >> 8 & SECOND;
  even = (even | even >> 8) & HALF, odd = (odd | odd >> 8) & HALF;
  return (uint32_t)(even | even >> 16) | (odd | odd >> 16) << 32;
}

void Rows::round(long token, long from, long count) {
  for (long tile = from / TILE; rounded && tile * TILE < from + count; tile++) {
    const long at = tile * tokens + token;
    const vec low = load(&x[at * TILE]), high = load(&x[at * TILE + LANES]);
    const float most = top(max(magnitude(low), magnitude(high)));
    // The largest number does not tell whether one is NaN; the sum does.
    const float by = std::isfinite(totals[2 * at] + totals[2 * at + 1]) ? most / 127.0f : NAN;
    const vec inverse = all(by >= FLT_MIN ? 1.0f / by : 0.0f);
    RoundedTile& made = rounded[at];
    store(made.whole, ::rounded(low * inverse));
    store(made.whole + LANES, ::rounded(high * inverse));
    for (long half = 0; half < 2; half++) {
      made.sums[half] = 0;
      for (long k = 0; k < LANES; k++) made.sums[half] += made.whole[half * LANES + k];
    }
    uint64_t eight[TILE / 8];
    memcpy(eight, made.whole, sizeof eight);
    for (uint64_t& each : eight) each = even_odd(each);
    memcpy(made.even_odd, eight, sizeof eight);
    made.scale = by, made.total = by * (float)(made.sums[0] + made.sums[1]);
  }
}

// A tile's weights as words of four bytes, and the activations in the same order.
template <typename F>
struct Words;

template <typename Scale, bool MINIMUM, int ZERO>
struct Words<Four<Scale, MINIMUM, ZERO>> {
  using F = Four<Scale, MINIMUM, ZERO>;
  using Sum = Dots<false>;
  static constexpr int COUNT = 2 * F::WORDS;
  INLINE ivec word(const typename F::Tile& tile, int c) {
    ivec w = F::word(tile, c / 2);
    EACH w.part[i] = (integers)((naturals)w.part[i] >> (c % 2 * 4)) & 0x0f0f0f0f;
    return w;
  }
  INLINE const int8_t* bytes(const RoundedTile& x, long) { return x.even_odd; }
  INLINE ivec found(const Sum& sum, const RoundedTile& x, long) {
    ivec y = sum.found(0);
    if (ZERO) EACH y.part[i] -= ZERO * (x.sums[0] + x.sums[1]);
    return y;
  }
};

template <typename Scale, bool MINIMUM, long GROUP>
struct Words<Eight<Scale, MINIMUM, GROUP>> {
  using F = Eight<Scale, MINIMUM, GROUP>;
  using Sum = Dots<true>;
  static constexpr int COUNT = F::WORDS;
  INLINE ivec word(const typename F::Tile& tile, int c) { return F::word(tile, c); }
  INLINE const int8_t* bytes(const RoundedTile& x, long half) { return x.whole + half * LANES; }
  INLINE ivec found(const Sum& sum, const RoundedTile& x, long half) {
    return sum.found(GROUP == TILE ? x.sums[0] + x.sums[1] : x.sums[half]);
  }
};

// `x` belongs to the first of these tokens among `among`. Word by word for all tokens: the additions of one token wait for
// each other, those of several do not.
template <typename F, int TOKENS>
static void some(const typename F::Tile* tile, long tiles, const RoundedTile* x, long among, float* y) {
  using W = Words<F>;
  vec sum[TOKENS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++) sum[t] = zero();
  for (long b = 0; b < tiles; b++, tile++) {
    for (size_t i = 0; i < sizeof(*tile); i += 64) __builtin_prefetch((const char*)tile + AHEAD + i);
    const long at = b * F::INPUTS, half = at % TILE / LANES;
    const RoundedTile* own = x + at / TILE * among;
    typename W::Sum part[TOKENS];
#if !defined(PORTABLE)  // where a product of integers takes several instructions, GCC would spend 10 s on these loops
#pragma GCC unroll 8
#endif
    for (int c = 0; c < W::COUNT; c++) {
      const ivec word = W::Sum::prepared(W::word(*tile, c));
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; t++) part[t].add(word, W::bytes(own[t], half) + 4 * c);
    }
    const By by = F::by(*tile);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      sum[t] = fma(to_floats(W::found(part[t], own[t], half)) * all(own[t].scale), by.scale, sum[t]);
      if (F::HAS_MINIMUM) sum[t] = fma(by.least, all(own[t].total), sum[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++) store(y + t * LANES, sum[t]);
}

template <typename F>
static void every(const Matrix& m, long group, const Rows& input, Span tokens, float* y) {
  const auto* tile = (const typename F::Tile*)m.data + group * m.tiles;
  long count = tokens.to - tokens.from;
  for (long i = 0; i < blocks(count); i++) {
    Span own = block(count, i);
    const RoundedTile* x = &input.rounded[tokens.from + own.from];
    float* out = y + own.from * LANES;
    switch (own.to - own.from) {
#define CASE(N) case N: some<F, N>(tile, m.tiles, x, input.tokens, out); break;
      FOR_EACH_COUNT(CASE)
#undef CASE
    }
  }
}

void rounded_product(const Matrix& m, long group, const Rows& input, Span tokens, float* y) {
  switch (m.format) { FOR_QUANTISED(every<F>(m, group, input, tokens, y);) }
}
