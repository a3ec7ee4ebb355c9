// Activations of several tokens, as products read them, and how many tokens are multiplied together.
#pragma once
#include <algorithm>
#include <climits>
#include <memory>

#include "round.h"

using Numbers = std::unique_ptr<float[]>;

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
INLINE long blocks(long tokens, long most = MOST) { return (tokens + most - 1) / most; }
INLINE Span block(long tokens, long i) {
  const uint32_t count = tokens, parts = blocks(tokens), at = i;  // dividing 64 bits takes three times as long
  return parts == 1 ? Span{0, tokens} : Span{count * at / parts, count * (at + 1) / parts};
}

// From how many tokens on AMX multiplies activations of 16 bits: with fewer, its tiles are too empty.
#if defined(__AMX_TILE__)
constexpr long TILES_FROM = 12;
#else
constexpr long TILES_FROM = LONG_MAX;
#endif

// Activations of several tokens, (tiles, tokens, 32): one address and constant distances reach a tile of all tokens. The last
// tile is filled up with zeros.
struct Rows {
  long tokens, tiles;
  long bits;       // 8 or 16: products with quantised matrices take rounded activations; 0: they take them as they are
  Numbers x;       // only if a product takes them as they are
  Numbers totals;  // (tiles, tokens, 2): the sum of each 16 inputs; as x
  std::unique_ptr<Rounded8[]> eight;  // (tiles, tokens)
  std::unique_ptr<Rounded16[]> sixteen;
  // Instead of these, where AMX multiplies: (blocks, tiles, tokens of a block), so that a block is one stream of memory.
  std::unique_ptr<Digits[]> digits;
  std::unique_ptr<DigitBytes[]> bytes;
  std::unique_ptr<Scaled[]> scaled;
  long width = 0;     // tokens of a block: as many in each, but for the last
  long together = 1;  // groups of outputs that a thread multiplies at once
  // `plain`: whether a product takes the activations as they are though others are rounded.
  Rows(long tokens, long columns, long bits, bool plain)
      : tokens(tokens), tiles((columns + TILE - 1) / TILE), bits(bits),
        x(plain || !bits ? new float[tiles * tokens * TILE] : nullptr),
        totals(x ? new float[tiles * tokens * 2] : nullptr), eight(bits == 8 ? new Rounded8[tiles * tokens] : nullptr),
        sixteen(bits == 16 && tokens < TILES_FROM ? new Rounded16[tiles * tokens] : nullptr) {
    if (bits != 16 || sixteen) return;
    constexpr long WIDEST = 64;  // weights are unpacked once for so many
    width = (tokens + blocks(tokens, WIDEST) - 1) / blocks(tokens, WIDEST), together = 2;
    const long room = blocks(tokens, width) * width * tiles;
    digits.reset(new Digits[room]), bytes.reset(new DigitBytes[room]), scaled.reset(new Scaled[room]);
  }
  // Blocks of tokens that a thread multiplies at once.
  long count_blocks() const { return blocks(tokens, digits ? width : MOST); }
  Span tokens_of(long i) const {
    return digits ? Span{i * width, std::min(tokens, (i + 1) * width)} : block(tokens, i);
  }
  // Where the digits of a token are.
  long place(long token, long tile) const { return (token / width * tiles + tile) * width + token % width; }
  // 32 numbers of a token.
  void put(long token, long tile, vec low, vec high) {
    const long at = tile * tokens + token;
    if (x) {
      store(&x[at * TILE], low), store(&x[at * TILE + LANES], high);
      totals[2 * at] = sum(low), totals[2 * at + 1] = sum(high);
    }
    if (sixteen) round16(low, high, sixteen[at]);
    if (digits) {
      const long to = place(token, tile);
      round_digits(low, high, digits[to], bytes[to], scaled[to]);
    }
    if (eight) round8(low, high, eight[at]);
  }
  // Numbers `from` (a multiple of 32) and on of a token; `count` is a multiple of 32, or reaches the end.
  void fill(long token, const float* v, long count, long from = 0) {
    for (long tile = from / TILE; count > 0; tile++, v += TILE, count -= TILE) {
      if (count >= TILE) put(token, tile, load(v), load(v + LANES));
      else if (count > LANES) put(token, tile, load(v), load_part(v + LANES, count - LANES));
      else put(token, tile, load_part(v, count), zero());
    }
  }
};
