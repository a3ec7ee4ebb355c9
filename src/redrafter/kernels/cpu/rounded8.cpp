// Activations in 8 bits.
#include "dots.h"
#include "rounded.h"

// A tile's weights as words of four bytes.
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
    return Sum::prepared(w);
  }
  INLINE const int8_t* numbers(const Rounded8& x, long, int c) { return x.number + 4 * c; }
  INLINE ivec sum(const Sum& part, const Rounded8& x, long) {
    ivec y = part.found(0);
    if (ZERO) EACH y.part[i] -= ZERO * (x.sums[0] + x.sums[1]);
    return y;
  }
};

template <typename Scale, bool MINIMUM, long GROUP>
struct Words<Eight<Scale, MINIMUM, GROUP>> {
  using F = Eight<Scale, MINIMUM, GROUP>;
  using Sum = Dots<true>;
  static constexpr int COUNT = F::WORDS;
  INLINE ivec word(const typename F::Tile& tile, int c) { return Sum::prepared(F::word(tile, c)); }
  INLINE const int8_t* numbers(const Rounded8& x, long half, int c) { return x.number + half * LANES + 4 * c; }
  INLINE ivec sum(const Sum& part, const Rounded8& x, long half) {
    return part.found(GROUP == TILE ? x.sums[0] + x.sums[1] : x.sums[half]);
  }
};

void product8(const Matrix& m, long group, const Rows& input, Span tokens, float* y) {
  const Rounded8* x = input.eight.get();
  switch (m.format) { FOR_QUANTISED((every<Words<F>, F>(m, group, x, input.tokens, tokens, y));) }
}
