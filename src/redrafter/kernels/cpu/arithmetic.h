// Arithmetic that a model's pass and a drafter share.
#pragma once
#include <cmath>

#include "vector.h"

// The factor that brings x to unit size: 1 / sqrt(mean(x²) + eps).
static inline float rms_factor(const float* x, float eps, long size) {
  vec squares = zero();
  long k = 0;
  for (; k + LANES <= size; k += LANES) squares = fma(load(x + k), load(x + k), squares);
  float total = sum(squares);
  for (; k < size; k++) total += x[k] * x[k];
  return 1.0f / std::sqrt(total / (float)size + eps);
}

// The length of a vector, but never 0.
static inline float length(const float* x, long size) {
  vec squares = zero();
  for (long k = 0; k < size; k += LANES) squares = fma(load(x + k), load(x + k), squares);
  float found = std::sqrt(sum(squares));
  return found > 1e-12f ? found : 1e-12f;
}

// y = x / rms(x) · weight, for any size. Without a weight, x / rms(x).
static inline void rms_norm(const float* x, const float* weight, float eps, float* y, long size) {
  float by = rms_factor(x, eps, size);
  for (long k = 0; k < size; k++) y[k] = weight ? x[k] * by * weight[k] : x[k] * by;
}

// y = x · cos + rotate_half(x) · sin; y may be x. Angles of the second half begin at `second`: 0 if both halves share them.
static inline void rotate(const float* x, const float* cos, const float* sin, long second, float* y, long size) {
  const long half = size / 2;
  long d = 0;
  for (; d + LANES <= half; d += LANES) {
    const vec a = load(x + d), b = load(x + d + half);
    store(y + d, a * load(cos + d) - b * load(sin + d));
    store(y + d + half, b * load(cos + d + second) + a * load(sin + d + second));
  }
  for (; d < half; d++) {
    const float a = x[d], b = x[d + half];
    y[d] = a * cos[d] - b * sin[d];
    y[d + half] = b * cos[d + second] + a * sin[d + second];
  }
}

INLINE vec sigmoid(vec x) { return all(1.0f) / (all(1.0f) + exp(zero() - x)); }
INLINE vec silu(vec x) { return x / (all(1.0f) + exp(zero() - x)); }
INLINE vec tanh(vec x) { return all(1.0f) - all(2.0f) / (exp(x + x) + all(1.0f)); }
