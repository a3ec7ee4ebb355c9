// Vectors by compiler extensions, without intrinsics: the same code for AVX-512, AVX2, NEON or plain scalars.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

constexpr long LANES = VECTOR_BYTES / 4;
typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ivec __attribute__((vector_size(VECTOR_BYTES)));

static inline vec load(const float* p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

// Loads `count` < LANES numbers and fills the other lanes with zeros.
static inline vec load_part(const float* p, long count) {
  float whole[LANES] = {};
  memcpy(whole, p, count * sizeof(float));
  return load(whole);
}

static inline vec all(float x) { return x - vec{}; }

// The sum of the lanes, always in the same order: the upper half is added to the lower half, repeatedly.
static inline float sum(vec v) {
  typedef float half __attribute__((vector_size(VECTOR_BYTES / 2)));
  half h[2];
  memcpy(h, &v, sizeof v);
  h[0] += h[1];
#if VECTOR_BYTES > 16
  typedef float quarter __attribute__((vector_size(VECTOR_BYTES / 4)));
  quarter q[2];
  memcpy(q, h, sizeof q);
  q[0] += q[1];
  float f[LANES / 4];
  memcpy(f, q, sizeof f);
#else
  float f[LANES / 2];
  memcpy(f, h, sizeof f);
#endif
#if VECTOR_BYTES == 64
  return (f[0] + f[2]) + (f[1] + f[3]);
#else
  return f[0] + f[1];
#endif
}

// e^x for x <= 88: 2^k · p(r), with an error of about one unit in the last place; 0 for very negative x.
static inline vec exp(vec x) {
  x = x > 88.0f ? all(88.0f) : x;
  ivec tiny = x < -87.0f;
  x = tiny ? all(-87.0f) : x;
  vec scaled = x * 1.44269504f;
  vec magic = all(12582912.0f);  // 1.5 · 2^23: adding this rounds to an integer
  vec k = (scaled + magic) - magic;
  vec r = x - k * 0.693359375f + k * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec bits = (__builtin_convertvector(k, ivec) + 127) << 23;
  vec power;
  memcpy(&power, &bits, sizeof power);
  return tiny ? vec{} : p * power;
}
