// Sums of products of bytes: weights of 16 rows, one row per lane and four weights to a word, times four activations that
// all rows share. Every sum is an integer, and so the same on every CPU.
#pragma once
#include "vector.h"

// Weights are -128 to 127 if SIGNED, otherwise 0 to 15, and then of at most eight words. Activations are -127 to 127.
template <bool SIGNED>
struct Dots {
#if defined(__AVX512VNNI__)
  // One instruction adds four products of unsigned and signed bytes. 128 is added to signed weights.
  __m512i sum = _mm512_setzero_si512();
  INLINE ivec prepared(ivec w) { return SIGNED ? ivec{{(integers)((naturals)w.part[0] ^ 0x80808080u)}} : w; }
  INLINE_MEMBER void add(ivec w, const int8_t* x) {  // by hand: GCC 12 would broadcast in an instruction of its own
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"((__m512i)w.part[0]), "m"(*(const int8_t(*)[4])x));
  }
  // The sums; `total` is that of all activations.
  INLINE_MEMBER ivec found(int32_t total) const { return {{(integers)sum - (SIGNED ? 128 * total : 0)}}; }
#else
  INLINE ivec prepared(ivec w) { return w; }
#if defined(__AVX512BW__) || defined(__AVX2__)
  // Products are added in pairs, of 16 bits: 2 · 128 · 127 fits, and so do eight times 2 · 15 · 127.
#if defined(__AVX512BW__)
  using Register = __m512i;
  INLINE Register every(int32_t x) { return _mm512_set1_epi32(x); }
  INLINE Register pairs(Register w, Register x) { return _mm512_maddubs_epi16(w, x); }
  INLINE Register plus(Register a, Register b) { return _mm512_add_epi16(a, b); }
  INLINE Register joined(Register a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
  INLINE Register magnitudes(Register w) { return _mm512_abs_epi8(w); }
  INLINE Register turned(Register x, Register w) {  // -x where w is negative
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  }
#else
  using Register = __m256i;
  INLINE Register every(int32_t x) { return _mm256_set1_epi32(x); }
  INLINE Register pairs(Register w, Register x) { return _mm256_maddubs_epi16(w, x); }
  INLINE Register plus(Register a, Register b) { return _mm256_add_epi16(a, b); }
  INLINE Register joined(Register a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
  INLINE Register magnitudes(Register w) { return _mm256_abs_epi8(w); }
  INLINE Register turned(Register x, Register w) { return _mm256_sign_epi8(x, w); }
#endif
  Register sum[PARTS] = {};
  INLINE_MEMBER void add(ivec weights, const int8_t* x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    EACH {
      Register w = (Register)weights.part[i], by = every(four);
      if (SIGNED) sum[i] = (Register)((integers)sum[i] + (integers)joined(pairs(magnitudes(w), turned(by, w))));
      else sum[i] = plus(sum[i], pairs(w, by));
    }
  }
  INLINE_MEMBER ivec found(int32_t) const {
    ivec y;
    EACH y.part[i] = (integers)(SIGNED ? sum[i] : joined(sum[i]));
    return y;
  }
#else
  ivec sum = {};
  INLINE_MEMBER void add(ivec w, const int8_t* x) {
#if defined(__ARM_NEON) && !defined(PORTABLE)
    int32_t four;
    memcpy(&four, x, sizeof four);
    const int8x16_t by = vreinterpretq_s8_s32(vdupq_n_s32(four));
    EACH {
      const int8x16_t own = (int8x16_t)w.part[i];
#if defined(__ARM_FEATURE_DOTPROD)
      sum.part[i] = (integers)vdotq_s32((int32x4_t)sum.part[i], own, by);
#else  // products are added in pairs, of 16 bits: 2 · 128 · 127 fits
      const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(own), vget_low_s8(by)), vmull_high_s8(own, by));
      sum.part[i] = (integers)vpadalq_s16((int32x4_t)sum.part[i], pairs);
#endif
    }
#else
    for (int k = 0; k < 4; k++) EACH sum.part[i] += (w.part[i] << (24 - 8 * k) >> 24) * (int32_t)x[k];
#endif
  }
  INLINE_MEMBER ivec found(int32_t) const { return sum; }
#endif
#endif
};
