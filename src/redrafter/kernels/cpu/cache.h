// Keys and values in the KV cache: fp32, fp16, or int8 with a scale for each head of a token, in the four bytes behind it.
// A number is what reads give; all attention is in fp32 over these numbers.
#pragma once
#include <cmath>

#include "vector.h"

constexpr long SCALE_BYTES = sizeof(float);

// One head of one slot. `step` is the distance between two slots, in numbers of the cache's type.
template <typename Number>
struct Slot {
  const Number* at;
  static long step(long size) { return size; }
  INLINE_MEMBER Slot(const Number* cache, long slot, long size) : at(cache + slot * size) {}
  INLINE_MEMBER vec operator()(long d) const { return number(at + d); }
};

template <>
struct Slot<int8_t> {
  const int8_t* at;
  vec by;
  static long step(long size) { return size + SCALE_BYTES; }
  INLINE_MEMBER Slot(const int8_t* cache, long slot, long size) : at(cache + slot * step(size)) {
    float scale;
    memcpy(&scale, at + size, sizeof scale);
    by = all(scale);
  }
  INLINE_MEMBER vec operator()(long d) const { return bytes(at + d) * by; }
};

// Asks memory for a head of a slot in advance.
template <typename Number>
INLINE void prefetch(const Number* cache, long slot, long size) {
  const long step = Slot<Number>::step(size) * sizeof(Number);
  for (long i = 0; i < step; i += 64) __builtin_prefetch((const char*)cache + slot * step + i, 0, 2);
}

static inline void write_head(float* to, const float* from, long size) { memcpy(to, from, size * sizeof(float)); }
static inline void write_head(uint16_t* to, const float* from, long size) {
  for (long d = 0; d < size; d += LANES) store(to + d, limited(load(from + d), 65504.0f));
}
static inline void write_head(int8_t* to, const float* from, long size) {
  vec most = zero();
  for (long d = 0; d < size; d += LANES) most = max(magnitude(load(from + d)), most);
  const float scale = top(most) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (long d = 0; d < size; d += LANES) store(to + d, rounded(limited(load(from + d) * all(inverse), 127.0f)));
  memcpy(to + size, &scale, sizeof scale);
}
