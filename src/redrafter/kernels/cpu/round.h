// Activations rounded to 8 or 16 bits, 32 inputs of a token at a time.
#pragma once
#include <cfloat>
#include <cmath>

#include "formats.h"

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

static inline void round8(vec low, vec high, Rounded8& to) {
  const uint32_t most = largest(low, high);
  float by = NAN;
  if (most < INFINITE) memcpy(&by, &most, sizeof by), by /= 127.0f;
  const vec inverse = all(by >= FLT_MIN ? 1.0f / by : 0.0f);
  store(to.number, rounded(low * inverse));
  store(to.number + LANES, rounded(high * inverse));
  for (long half = 0; half < 2; half++) {
    to.sums[half] = 0;
    for (long k = 0; k < LANES; k++) to.sums[half] += to.number[half * LANES + k];
  }
  to.scale = by, to.total = by * (float)(to.sums[0] + to.sums[1]);
}

// The scale is a power of two, so rounding is the only thing that changes a number: times its scale it is exact. No number is
// beyond 127 · 257 = 32639, so that each is two signed bytes on CPUs that multiply bytes only.
constexpr uint32_t TINY = (127 - 80) << 23;   // the bits of 2^-80: what is below has no effect on any sum
constexpr uint32_t BEYOND = 0x10100;          // added to bits, it carries to the next power of two where 32639 is passed

// Of each four numbers the first, third, second and fourth, in 16 bits.
static inline void store_pairs(int16_t* y, ivec low, ivec high) {
#if defined(__AVX512BW__)
  alignas(64) static constexpr int16_t ORDER[TILE] = {0,  4,  2,  6,  8,  12, 10, 14, 16, 20, 18, 22, 24, 28, 26, 30,
                                                      32, 36, 34, 38, 40, 44, 42, 46, 48, 52, 50, 54, 56, 60, 58, 62};
  const __m512i a = (__m512i)low.part[0], b = (__m512i)high.part[0];
  _mm512_storeu_si512(y, _mm512_permutex2var_epi16(a, _mm512_load_si512(ORDER), b));
#else
  uint64_t two[LANES];
  memcpy(two, &low, sizeof low);
  memcpy(two + LANES / 2, &high, sizeof high);
  for (long k = 0; k < LANES; k += 2) {
    const uint64_t four = (two[k] & 0x0000ffff0000ffff) | (two[k + 1] << 16 & 0xffff0000ffff0000);
    memcpy(y + 2 * k, &four, sizeof four);
  }
#endif
}

static inline void round16(vec low, vec high, Rounded16& to) {
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
  store_pairs(to.number, one, two);
  EACH one.part[i] += two.part[i];
  const int32_t total = sum(one);
  to.zeros = ZERO_AT * total, to.total = to.scale * (float)total;
}
