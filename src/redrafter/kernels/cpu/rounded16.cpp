// Activations in 16 bits. The scale of each 32 is a power of two, so rounding is the only thing that changes them: with it, a
// number times its scale is exact. No number is beyond 127 · 257 = 32639, so that each is two signed bytes on CPUs that
// multiply bytes only.
#include <cmath>

#include "pairs.h"
#include "rounded.h"

constexpr uint32_t TINY = (127 - 80) << 23;   // the bits of 2^-80: what is below has no effect on any sum
constexpr uint32_t BEYOND = 0x10100;          // added to bits, it carries to the next power of two where 32639 is passed

// Of each four numbers the first, third, second and fourth, in 16 bits.
static void store_pairs(int16_t* y, ivec x) {
  uint64_t half[LANES / 2];
  memcpy(half, &x, sizeof half);
  for (long k = 0; k < LANES / 2; k += 2) {
    const uint64_t four = (half[k] & 0x0000ffff0000ffff) | (half[k + 1] << 16 & 0xffff0000ffff0000);
    memcpy(y + 2 * k, &four, sizeof four);
  }
}

void round16(vec low, vec high, Rounded16& to) {
  const uint32_t most = largest(low, high), power = (most + BEYOND) >> 23;
  uint32_t bits = (power - 14) << 23, inverse_bits = (268 - power) << 23;
  if (most < TINY) bits = inverse_bits = 0;
  if (most >= INFINITE) bits = 0x7fc00000, inverse_bits = 0;  // no number; so the token's result is none either
  float inverse;
  memcpy(&to.scale, &bits, sizeof bits);
  memcpy(&inverse, &inverse_bits, sizeof bits);
  ivec one, two;
  if (inverse_bits) one = rounded(low * all(inverse)), two = rounded(high * all(inverse));
  else one = two = {};
  store_pairs(to.number, one);
  store_pairs(to.number + LANES, two);
  EACH one.part[i] += two.part[i];
  const int32_t total = sum(one);
  to.zeros = ZERO_AT * total, to.total = to.scale * (float)total;
}

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
