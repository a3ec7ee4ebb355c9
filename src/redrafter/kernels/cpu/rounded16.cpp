// Activations in 16 bits.
#include "pairs.h"
#include "rounded.h"

// A tile's weights as words of two.
template <typename F>
struct Words;

template <typename Scale, bool MINIMUM, int ZERO>
struct Words<Four<Scale, MINIMUM, ZERO>> {
  using F = Four<Scale, MINIMUM, ZERO>;
  using Sum = Pairs;
  static constexpr int COUNT = 4 * F::WORDS;
  INLINE ivec word(const typename F::Tile& tile, int c) {
    constexpr int SHIFTS[] = {0, 8, 4, 12};
    ivec w = F::word(tile, c / 4);
    EACH {
      ushorts halves = (ushorts)w.part[i] >> SHIFTS[c % 4];
      w.part[i] = (integers)(SHIFTS[c % 4] == 12 ? halves : halves & 15);
    }
    return w;
  }
  INLINE const int16_t* numbers(const Rounded16& x, long, int c) { return x.number + 2 * c; }
  INLINE ivec sum(const Sum& part, const Rounded16& x, long) {
    ivec y = part.sum();
    if (ZERO) EACH y.part[i] -= x.zeros;
    return y;
  }
};

template <typename Scale, bool MINIMUM, long GROUP>
struct Words<Eight<Scale, MINIMUM, GROUP>> {
  using F = Eight<Scale, MINIMUM, GROUP>;
  using Sum = Pairs;
  static constexpr int COUNT = 2 * F::WORDS;
  INLINE ivec word(const typename F::Tile& tile, int c) {
    ivec w = F::word(tile, c / 2);
    EACH {
      const shorts pair = (shorts)w.part[i];
      w.part[i] = (integers)(c % 2 ? pair >> 8 : pair << 8 >> 8);
    }
    return w;
  }
  INLINE const int16_t* numbers(const Rounded16& x, long half, int c) { return x.number + half * LANES + 2 * c; }
  INLINE ivec sum(const Sum& part, const Rounded16&, long) { return part.sum(); }
};

void product16(const Matrix& m, long group, const Rows& input, Span tokens, float* y) {
  const Rounded16* x = input.sixteen.get();
  switch (m.format) { FOR_QUANTISED((every<Words<F>, F>(m, group, x, input.tokens, tokens, y));) }
}
