// Activations of several tokens, as products read them, and how many tokens are multiplied together.
#pragma once
#include <memory>

#include "formats.h"

using Numbers = std::unique_ptr<float[]>;
constexpr long TILE = 32;  // inputs whose activations lie together; every format's tiles fit into it

struct Rounded8 {  // 32 inputs of a token in 8 bits
  int8_t number[TILE];  // input / scale, rounded
  int32_t sums[2];      // of each 16 of them
  float scale, total;   // total: scale · the sum of all 32
};

struct Rounded16 {  // 32 inputs of a token in 16 bits
  int16_t number[TILE];  // input / scale, rounded; of each 4 inputs the first, third, second and fourth: see pairs.h
  int32_t zeros;         // ZERO_AT · the sum of all 32
  float scale, total;
};

void round8(vec low, vec high, Rounded8& to);
void round16(vec low, vec high, Rounded16& to);

// Activations of several tokens, (tiles, tokens, 32): one address and constant distances reach a tile of all tokens.
struct Rows {
  long tokens, tiles;
  long bits;       // 8 or 16: products with quantised matrices take rounded activations; 0: they take them as they are
  Numbers x;       // filled up with zeros to whole tiles
  Numbers totals;  // (tiles, tokens, 2): the sum of each 16 inputs; only if nothing is rounded
  std::unique_ptr<Rounded8[]> eight;  // (tiles, tokens)
  std::unique_ptr<Rounded16[]> sixteen;
  Rows(long tokens, long columns, long bits)
      : tokens(tokens), tiles((columns + TILE - 1) / TILE), bits(bits), x(new float[tiles * tokens * TILE]()),
        totals(bits ? nullptr : new float[tiles * tokens * 2]()),
        eight(bits == 8 ? new Rounded8[tiles * tokens]() : nullptr),
        sixteen(bits == 16 ? new Rounded16[tiles * tokens]() : nullptr) {}
  // Numbers `from` (a multiple of 16) and on of a token.
  void put(long token, long from, const float* v, long count) {
    for (long k = from; k < from + count; k += LANES, v += LANES) {
      long half = (k / TILE * tokens + token) * 2 + k / LANES % 2, left = from + count - k;
      if (left >= LANES) store(&x[half * LANES], load(v));
      else memcpy(&x[half * LANES], v, left * sizeof(float));
      if (totals) totals[half] = sum(load(&x[half * LANES]));
    }
  }
  // Rounds what was put, if products take rounded activations. `from` is a multiple of 32, `count` is one or reaches the end.
  void round(long token, long from, long count) {
    for (long tile = from / TILE; bits && tile * TILE < from + count; tile++) {
      const long at = tile * tokens + token;
      const vec low = load(&x[at * TILE]), high = load(&x[at * TILE + LANES]);
      if (eight) round8(low, high, eight[at]);
      else round16(low, high, sixteen[at]);
    }
  }
  // All numbers of a token, rounded.
  void fill(long token, const float* v, long count) {
    put(token, 0, v, count);
    round(token, 0, count);
  }
};

// Neighbouring tokens of a pass.
struct Span {
  long from, to;
};

// Tokens that are multiplied together: their sums fit into registers, two vectors for each token, and some for weights.
// FOR_EACH_COUNT calls DO for every number of them.
#if defined(__AVX512F__)
constexpr long MOST = 8;
#define FOR_EACH_COUNT(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#elif defined(__ARM_NEON) && !defined(PORTABLE)
constexpr long MOST = 3;
#define FOR_EACH_COUNT(DO) DO(1) DO(2) DO(3)
#elif !defined(PORTABLE)
constexpr long MOST = 4;
#define FOR_EACH_COUNT(DO) DO(1) DO(2) DO(3) DO(4)
#else
constexpr long MOST = 2;
#define FOR_EACH_COUNT(DO) DO(1) DO(2)
#endif
// Blocks have nearly the same size: nine tokens are five and four, not eight and one.
INLINE long blocks(long tokens) { return (tokens + MOST - 1) / MOST; }
INLINE Span block(long tokens, long i) { return {tokens * i / blocks(tokens), tokens * (i + 1) / blocks(tokens)}; }
