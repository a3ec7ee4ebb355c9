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

// The same for AMX: a number is 256 · high + low, two signed bytes.
struct alignas(64) Digits {
  uint16_t high[TILE], low[TILE];  // bf16 of 256 · high and of low, in the order of Rounded16
};
struct alignas(64) DigitBytes {
  int8_t high[TILE], low[TILE];
};
struct Scaled {
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

// 32 inputs as integers, and what belongs to their sum.
struct Whole {
  ivec low, high;
  int32_t sum;
  float scale, total;
};

static inline Whole whole(vec low, vec high) {
  const uint32_t most = largest(low, high), power = (most + BEYOND) >> 23;
  uint32_t bits = (power - 14) << 23, inverse_bits = (268 - power) << 23;
  if (most < TINY) bits = inverse_bits = 0;
  if (most >= INFINITE) bits = 0x7fc00000, inverse_bits = 0;  // no number; so the token's result is none either
  float inverse;
  Whole y = {};
  memcpy(&y.scale, &bits, sizeof bits);
  memcpy(&inverse, &inverse_bits, sizeof bits);
  if (inverse_bits) y.low = rounded(low * all(inverse)), y.high = rounded(high * all(inverse));
  ivec both;
  EACH both.part[i] = y.low.part[i] + y.high.part[i];
  y.sum = sum(both), y.total = y.scale * (float)y.sum;
  return y;
}

static inline void round16(vec low, vec high, Rounded16& to) {
  const Whole numbers = whole(low, high);
  store_pairs(to.number, numbers.low, numbers.high);
  to.zeros = ZERO_AT * numbers.sum, to.scale = numbers.scale, to.total = numbers.total;
}

static inline void round_digits(vec low, vec high, Digits& to, DigitBytes& bytes, Scaled& by) {
  const Whole numbers = whole(low, high);
  ivec upper[2] = {numbers.low, numbers.high}, lower[2], upper_bits[2], lower_bits[2];
  for (long half = 0; half < 2; half++) {
    EACH {
      const integers number = upper[half].part[i], top = (number + 128) & ~255;
      upper[half].part[i] = top >> 8, lower[half].part[i] = number - top;
      // Eight significant bits: the upper half of a float is all of it.
      upper_bits[half].part[i] = (integers)((naturals)__builtin_convertvector(top, floats) >> 16);
      lower_bits[half].part[i] = (integers)((naturals)__builtin_convertvector(number - top, floats) >> 16);
    }
    store(bytes.high + half * LANES, upper[half]), store(bytes.low + half * LANES, lower[half]);
  }
  store_pairs((int16_t*)to.high, upper_bits[0], upper_bits[1]);
  store_pairs((int16_t*)to.low, lower_bits[0], lower_bits[1]);
  by = {numbers.scale, numbers.total};
}
