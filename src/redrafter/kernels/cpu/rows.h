// Activations of several tokens, as products read them, and how many tokens are multiplied together.
#pragma once
#include <memory>

#include "formats.h"

using Numbers = std::unique_ptr<float[]>;
constexpr long TILE = 32;  // inputs whose activations lie together; every format's tiles fit into it

struct RoundedTile {  // 32 inputs of a token in 8 bits
  int8_t whole[TILE];     // input / scale, rounded
  int8_t even_odd[TILE];  // the same, of each 8 inputs the even ones, then the odd ones: the order of unpacked nibbles
  int32_t sums[2];        // of each 16 of them
  float scale, total;     // total: scale · the sum of all 32
};

// Activations of several tokens, (tiles, tokens, 32): one address and constant distances reach a tile of all tokens.
struct Rows {
  long tokens, tiles;
  Numbers x;       // filled up with zeros to whole tiles
  Numbers totals;  // (tiles, tokens, 2): the sum of each 16 inputs
  std::unique_ptr<RoundedTile[]> rounded;  // (tiles, tokens); null: products take the activations as they are
  Rows(long tokens, long columns, bool rounds)
      : tokens(tokens), tiles((columns + TILE - 1) / TILE), x(new float[tiles * tokens * TILE]()),
        totals(new float[tiles * tokens * 2]()), rounded(rounds ? new RoundedTile[tiles * tokens]() : nullptr) {}
  // Numbers `from` (a multiple of 16) and on of a token.
  void put(long token, long from, const float* v, long count) {
    for (long k = from; k < from + count; k += LANES, v += LANES) {
      long half = (k / TILE * tokens + token) * 2 + k / LANES % 2, left = from + count - k;
      if (left >= LANES) store(&x[half * LANES], load(v));
      else memcpy(&x[half * LANES], v, left * sizeof(float));
      totals[half] = sum(load(&x[half * LANES]));
    }
  }
  // Rounds what was put, if products take rounded activations. `from` is a multiple of 32, `count` is one or reaches the end.
  void round(long token, long from, long count);
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
