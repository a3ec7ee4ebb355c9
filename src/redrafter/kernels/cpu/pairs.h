// Sums of products of 16-bit integers: weights of 16 rows, one row per lane and two weights to a word, times two activations
// that all rows share. Every sum is an integer, and so the same on every CPU.
//
// A word of four bytes in memory becomes words of two: one with its first and third byte, one with its second and fourth.
#pragma once
#include "vector.h"

typedef int16_t shorts __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t ushorts __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

struct Pairs {
#if defined(__AVX512VNNI__)
  __m512i sums = _mm512_setzero_si512();
  INLINE_MEMBER void add(ivec w, const int16_t* x) {  // by hand: GCC 12 would broadcast in an instruction of its own
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"((__m512i)w.part[0]), "m"(*(const int16_t(*)[2])x));
  }
  INLINE_MEMBER ivec sum() const { return {{(integers)sums}}; }
#elif defined(__ARM_NEON) && !defined(PORTABLE)
  int32x4_t sums[PARTS][2] = {};  // of two rows each: neighbouring numbers belong to one row
  INLINE_MEMBER void add(ivec w, const int16_t* x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    const int16x8_t by = vreinterpretq_s16_s32(vdupq_n_s32(two));
    EACH {
      const int16x8_t weights = (int16x8_t)w.part[i];
      sums[i][0] = vmlal_s16(sums[i][0], vget_low_s16(weights), vget_low_s16(by));
      sums[i][1] = vmlal_high_s16(sums[i][1], weights, by);
    }
  }
  INLINE_MEMBER ivec sum() const {
    ivec y;
    EACH y.part[i] = (integers)vpaddq_s32(sums[i][0], sums[i][1]);
    return y;
  }
#else
  ivec sums = {};
  INLINE_MEMBER void add(ivec w, const int16_t* x) {
#if defined(__AVX512BW__) || defined(__AVX2__)
    int32_t two;
    memcpy(&two, x, sizeof two);
#if defined(__AVX512BW__)
    sums.part[0] += (integers)_mm512_madd_epi16((__m512i)w.part[0], _mm512_set1_epi32(two));
#else
    EACH sums.part[i] += (integers)_mm256_madd_epi16((__m256i)w.part[i], _mm256_set1_epi32(two));
#endif
#else
    EACH sums.part[i] += (w.part[i] << 16 >> 16) * (int32_t)x[0] + (w.part[i] >> 16) * (int32_t)x[1];
#endif
  }
  INLINE_MEMBER ivec sum() const { return sums; }
#endif
};
