// Vectors of 16 floats and 16 integers, the same on every CPU: one AVX-512 register, two of AVX2, four of NEON or SSE.
//
// Multiplication and addition are fused only where `fma` says so (the library is compiled with -ffp-contract=off), so the
// order and rounding of every sum is what the source says, whichever template it was compiled from.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && !defined(PORTABLE)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

constexpr long LANES = 16;

#if defined(__AVX512F__)
constexpr int PARTS = 1;
#elif defined(__AVX2__)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 4;
#endif
constexpr int WIDTH = LANES / PARTS;
typedef float floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t naturals __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

struct vec {
  floats part[PARTS];
};
struct ivec {
  integers part[PARTS];
};

#define EACH for (int i = 0; i < PARTS; i++)

INLINE floats fma_part(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && !defined(PORTABLE)
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE vec zero() {
  vec y;
  EACH y.part[i] = floats{};
  return y;
}
INLINE vec all(float x) {
  vec y;
  EACH y.part[i] = x - floats{};  // a broadcast alone: x - 0 is x
  return y;
}
INLINE vec load(const float* x) {
  vec y;
  EACH y.part[i] = *(const floats*)(x + i * WIDTH);
  return y;
}
INLINE void store(float* y, vec x) { EACH *(floats*)(y + i * WIDTH) = x.part[i]; }
// The first `count` < 16 numbers; the others are 0.
INLINE vec load_part(const float* x, long count) {
  float whole[LANES] = {};
  memcpy(whole, x, count * sizeof(float));
  return load(whole);
}
INLINE void store_part(float* y, vec x, long count) { memcpy(y, &x, count * sizeof(float)); }
INLINE ivec load(const uint32_t* x) {
  ivec y;
  EACH y.part[i] = *(const integers*)(x + i * WIDTH);
  return y;
}

INLINE vec operator+(vec a, vec b) {
  EACH a.part[i] += b.part[i];
  return a;
}
INLINE vec operator-(vec a, vec b) {
  EACH a.part[i] -= b.part[i];
  return a;
}
INLINE vec operator*(vec a, vec b) {
  EACH a.part[i] *= b.part[i];
  return a;
}
INLINE vec operator/(vec a, vec b) {
  EACH a.part[i] /= b.part[i];
  return a;
}
INLINE vec fma(vec a, vec b, vec c) {  // a · b + c
  EACH c.part[i] = fma_part(a.part[i], b.part[i], c.part[i]);
  return c;
}
INLINE vec max(vec a, vec b) {
  EACH a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}
INLINE vec limited(vec x, float most) {  // to -most ... most
  EACH {
    x.part[i] = x.part[i] > most ? most - floats{} : x.part[i];
    x.part[i] = x.part[i] < -most ? -most - floats{} : x.part[i];
  }
  return x;
}
INLINE vec magnitude(vec x) {
  EACH x.part[i] = x.part[i] < 0.0f ? -x.part[i] : x.part[i];
  return x;
}
INLINE vec to_floats(ivec x) {
  vec y;
  EACH y.part[i] = __builtin_convertvector(x.part[i], floats);
  return y;
}
// To the nearest integer, for numbers below 2^22: adding 1.5 · 2^23 leaves it in the lowest bits.
INLINE ivec rounded(vec x) {
  ivec y;
  EACH y.part[i] = (integers)((naturals)(x.part[i] + 12582912.0f) - 0x4b400000u);
  return y;
}
typedef int8_t octets __attribute__((vector_size(WIDTH), aligned(1), may_alias));
INLINE void store(int8_t* y, ivec x) { EACH *(octets*)(y + i * WIDTH) = __builtin_convertvector(x.part[i], octets); }
INLINE vec as_floats(ivec x) {  // the same bits
  vec y;
  EACH y.part[i] = (floats)x.part[i];
  return y;
}

// Makes the compiler have x in registers at this place, where its own order of operations would need too many registers.
INLINE void settle(vec& x) {
#if defined(__AVX512F__)
  EACH asm volatile("" : "+v"(x.part[i]));
#elif defined(__AVX2__)
  EACH asm volatile("" : "+x"(x.part[i]));
#elif defined(__aarch64__)
  EACH asm volatile("" : "+w"(x.part[i]));
#endif
}

// Sixteen numbers added in pairs: i and i + 8, then i and i + 4, i + 2, i + 1.
INLINE float sum(vec x) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
  __m512 v = (__m512)x.part[0];
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  __m256 eight = (__m256)(x.part[0] + x.part[1]);
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  floats four = (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}
// The sums of sixteen vectors, each added in the same order as by `sum`.
INLINE vec sums(const vec* x) {
#if defined(__AVX512F__)
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) {  // halves of two vectors
    __m512 u = (__m512)x[2 * i].part[0], w = (__m512)x[2 * i + 1].part[0];
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(u, w, 0x44), _mm512_shuffle_f32x4(u, w, 0xee));
  }
  for (int i = 0; i < 4; i++)  // quarters of four
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
  for (int i = 0; i < 2; i++)  // pairs of eight
    c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee));
  __m512 all = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {{(floats)_mm512_permutexvar_ps(order, all)}};
#else
  float v[LANES];
  for (int i = 0; i < LANES; i++) v[i] = sum(x[i]);
  return load(v);
#endif
}
INLINE float top(vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x.part[0]);
#endif
  float v[LANES], most;
  store(v, x);
  most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// The bits of the largest magnitude. As integers: the order of magnitudes is that of their bits, and what is no number
// comes after all numbers, from those of infinity on.
INLINE uint32_t largest(vec a, vec b) {
  naturals most = {};
  EACH {
    const naturals one = (naturals)a.part[i] & 0x7fffffffu, two = (naturals)b.part[i] & 0x7fffffffu;
    const naturals more = one > two ? one : two;
    most = more > most ? more : most;
  }
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)most);
#endif
  uint32_t found = 0;
  for (int i = 0; i < WIDTH; i++) found = most[i] > found ? most[i] : found;
  return found;
}
constexpr uint32_t INFINITE = 0x7f800000;
INLINE int32_t sum(ivec x) {
  integers all = {};
  EACH all += x.part[i];
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)all);
#endif
  int32_t found = 0;
  for (int i = 0; i < WIDTH; i++) found += all[i];
  return found;
}

// e^x to the last bit or two (Cephes' expf), for x in the range of fp32's exponents; below it, a tiny number.
INLINE vec exp(vec x) {
  EACH {
    floats& v = x.part[i];
    v = v < 88.0f ? v : 88.0f - floats{};
    v = v > -87.0f ? v : -87.0f - floats{};
    floats scaled = v * 1.44269504f;
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer.
    floats whole = (scaled + 12582912.0f) - 12582912.0f;
    floats rest = fma_part(whole, -0.693359375f - floats{}, v);
    rest = fma_part(whole, 2.12194440e-4f - floats{}, rest);
    floats p = 1.9875691500e-4f - floats{};
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
      p = fma_part(p, rest, c - floats{});
    integers power = (__builtin_convertvector(whole, integers) + 127) << 23;
    v = p * (floats)power;
  }
  return x;
}

INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#endif
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, bits = h & 0x7fff, out;
  float f;
  if (bits >= 0x7c00) out = (bits << 13) | 0x7f800000;  // infinity or no number
  else if (bits >= 0x0400) out = (bits << 13) + (112u << 23);
  else {
    f = (float)bits * 5.9604644775390625e-08f;  // below the smallest normal number: a multiple of 2^-24
    memcpy(&out, &f, 4);
  }
  out |= sign;
  memcpy(&f, &out, 4);
  return f;
}

static inline vec halves(const uint16_t* x) {  // fp16
  vec y;
#if defined(__AVX512F__)
  y.part[0] = (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__AVX2__) && defined(__F16C__)
  EACH y.part[i] = (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + 8 * i)));
#elif defined(__ARM_NEON) && !defined(PORTABLE)
  EACH y.part[i] = (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i)));
#else
  float v[LANES];
  for (int i = 0; i < LANES; i++) v[i] = half_to_float(x[i]);
  y = load(v);
#endif
  return y;
}
INLINE uint16_t float_to_half(float f) {  // to the nearest, of two equally near ones to the even one
  uint32_t bits, sign;
  memcpy(&bits, &f, 4);
  sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
  if (bits >= 0x7f800000) return sign | 0x7c00 | (bits > 0x7f800000 ? 0x200 : 0);  // infinity or no number
  if (bits >= 0x477ff000) return sign | 0x7c00;                                    // too large
  if (bits < 0x38800000) {  // a multiple of 2^-24: adding 0.5 leaves it in the lowest bits
    float small;
    memcpy(&small, &bits, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return sign | (bits - 0x3f000000);
  }
  return sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

static inline void store(uint16_t* y, vec x) {  // fp16
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)y, _mm512_cvtps_ph((__m512)x.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
  EACH _mm_storeu_si128((__m128i*)(y + 8 * i), _mm256_cvtps_ph((__m256)x.part[i], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON) && !defined(PORTABLE)
  EACH vst1_u16(y + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x.part[i])));
#else
  float v[LANES];
  store(v, x);
  for (int i = 0; i < LANES; i++) y[i] = float_to_half(v[i]);
#endif
}
INLINE vec bytes(const int8_t* x) {
#if defined(__AVX512F__)
  return {{(floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x)))}};
#elif defined(__AVX2__)
  vec y;
  EACH y.part[i] = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8 * i))));
  return y;
#else
  float v[LANES];
  for (int i = 0; i < LANES; i++) v[i] = (float)x[i];
  return load(v);
#endif
}
INLINE vec number(const float* x) { return load(x); }
INLINE vec number(const uint16_t* x) { return halves(x); }

INLINE vec bfloats(const uint16_t* x) {
  uint32_t v[LANES];
  for (int i = 0; i < LANES; i++) v[i] = (uint32_t)x[i] << 16;
  return as_floats(load(v));
}
