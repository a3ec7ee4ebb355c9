// Products of 8-bit activations with 4-bit matrices: sums of a tile are integers.
#include "rounded.h"

#include <cmath>

using Nibbles = Four<uint16_t, true, 0>;
constexpr long AHEAD = 2048;  // bytes that memory is asked for in advance

void RoundedRows::put(long token, long from, const float* v, long count) {
  Rows::put(token, from, v, count);
  for (long tile = from / TILE; tile < (from + count) / TILE; tile++, v += TILE) {
    const float most = top(max(magnitude(load(v)), magnitude(load(v + LANES))));
    const float by = most / 127.0f, inverse = by > 0 && std::isfinite(by) ? 1.0f / by : 0.0f;
    int32_t whole[TILE], total = 0;
    store(whole, rounded(load(v) * all(inverse)));
    store(whole + LANES, rounded(load(v + LANES) * all(inverse)));
    const long at = tile * tokens + token;
    for (long k = 0; k < TILE; k++) {
      total += whole[k];
      bytes[at * TILE + k / 8 * 8 + k % 2 * 4 + k % 8 / 2] = (int8_t)whole[k];
    }
    scales[2 * at] = by, scales[2 * at + 1] = by * (float)total;
  }
}

// Sixteen rows' sums of 32 nibbles times the bytes x. A pair of products is at most 2 · 15 · 127, and eight such pairs
// still fit into 16 bits.
struct Sums {
#if defined(__AVX512BW__) || defined(__AVX2__)
#if defined(__AVX512BW__)
  using Register = __m512i;
  INLINE Register every(int32_t x) { return _mm512_set1_epi32(x); }
  INLINE Register both(Register a, Register b) { return _mm512_and_si512(a, b); }
  INLINE Register shifted(Register a) { return _mm512_srli_epi32(a, 4); }
  INLINE Register pairs(Register a, Register x) { return _mm512_maddubs_epi16(a, x); }
  INLINE Register plus(Register a, Register b) { return _mm512_add_epi16(a, b); }
  INLINE Register joined(Register a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
#else
  using Register = __m256i;
  INLINE Register every(int32_t x) { return _mm256_set1_epi32(x); }
  INLINE Register both(Register a, Register b) { return _mm256_and_si256(a, b); }
  INLINE Register shifted(Register a) { return _mm256_srli_epi32(a, 4); }
  INLINE Register pairs(Register a, Register x) { return _mm256_maddubs_epi16(a, x); }
  INLINE Register plus(Register a, Register b) { return _mm256_add_epi16(a, b); }
  INLINE Register joined(Register a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
#endif
  Register nibbles[PARTS][8];
  INLINE_MEMBER explicit Sums(const Nibbles::Tile& tile) {
    for (int c = 0; c < 4; c++) {
      ivec word = Nibbles::word(tile, c);
      EACH {
        nibbles[i][2 * c] = both((Register)word.part[i], every(0x0f0f0f0f));
        nibbles[i][2 * c + 1] = both(shifted((Register)word.part[i]), every(0x0f0f0f0f));
      }
    }
  }
  INLINE_MEMBER ivec times(const int8_t* x) const {
    int32_t word[8];
    memcpy(word, x, sizeof word);
    ivec y;
    EACH {
      Register sum = pairs(nibbles[i][0], every(word[0]));
      for (int c = 1; c < 8; c++) sum = plus(sum, pairs(nibbles[i][c], every(word[c])));
      y.part[i] = (integers)joined(sum);
    }
    return y;
  }
#else
  const Nibbles::Tile& tile;
  INLINE_MEMBER explicit Sums(const Nibbles::Tile& tile) : tile(tile) {}
  INLINE_MEMBER ivec times(const int8_t* x) const {
    ivec y;
    EACH y.part[i] = integers{};
    for (int c = 0; c < 4; c++) {
      ivec word = Nibbles::word(tile, c);
      for (int k = 0; k < 8; k++)
        EACH y.part[i] += ((integers)((naturals)word.part[i] >> (4 * k)) & 15) * (int32_t)x[8 * c + k % 2 * 4 + k / 2];
    }
    return y;
  }
#endif
};

template <int TOKENS>
static void some(const Nibbles::Tile* tile, long tiles, const int8_t* x, const float* scales, long among, float* y) {
  vec sum[TOKENS];
  for (int t = 0; t < TOKENS; t++) sum[t] = zero();
  for (long b = 0; b < tiles; b++, tile++, x += among * TILE, scales += 2 * among) {
    for (size_t i = 0; i < sizeof(*tile); i += 64) __builtin_prefetch((const char*)tile + AHEAD + i);
    const Sums own(*tile);
    const By by = Nibbles::by(*tile);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      vec part = to_floats(own.times(x + t * TILE)) * all(scales[2 * t]);
      sum[t] = fma(by.least, all(scales[2 * t + 1]), fma(part, by.scale, sum[t]));
    }
  }
  for (int t = 0; t < TOKENS; t++) store(y + t * LANES, sum[t]);
}

void rounded_product(const Matrix& m, long group, const RoundedRows& input, float* y) {
  if (m.format != 0) return product(m, group, input, y);
  const auto* tile = (const Nibbles::Tile*)m.data + group * m.tiles;
  for (long i = 0; i < blocks(input.tokens); i++) {
    const Span own = block(input.tokens, i);
    const int8_t* x = &input.bytes[own.from * TILE];
    const float* scales = &input.scales[own.from * 2];
    float* out = y + own.from * LANES;
    switch (own.to - own.from) {
#define CASE(N) case N: some<N>(tile, m.tiles, x, scales, input.tokens, out); break;
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
