// What a step does besides passes: committing a path, and random numbers for choices at a temperature.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "indexes.h"
#include "team.h"

static constexpr long TOGETHER = 2048;  // random numbers that a thread makes at once

// Commits a path in `parts` tensors, `part_step` bytes apart. The tree's nodes lie in the slots from `lengths` (B,) on;
// nodes `path` (B, steps) move to the first of these slots. Sources and destinations overlap, so all are read before any
// is written. Sizes are in bytes, so that any dtype works.
extern "C" long move_path(char* cache, const int64_t* lengths, const int64_t* path, long parts, long part_step,
                          long batch, long heads, long slots, long steps, long row_step, long head_step, long size) {
  for (long b = 0; b < batch; b++) {
    const long room = slots - lengths[b];  // lengths[b] <= slots - steps, and all nodes below it
    if (lengths[b] < 0 || room < steps || !inside(path + b * steps, steps, room)) return OUTSIDE_TENSOR;
  }
  std::vector<char> moved(steps * size);
  for (long b = 0; b < batch; b++, path += steps) {
    long still = 0;  // number of leading nodes that are in their slots already
    while (still < steps && path[still] == still) still++;
    if (still == steps) continue;
    for (long part = 0; part < parts * heads; part++) {
      char* tree = cache + part / heads * part_step + b * row_step + part % heads * head_step + lengths[b] * size;
      for (long j = still; j < steps; j++) memcpy(&moved[j * size], tree + path[j] * size, size);
      for (long j = still; j < steps; j++) memcpy(tree + j * size, &moved[j * size], size);
    }
  }
  return DONE;
}

// splitmix64, as in core/noise.py: the v-th output of the sequence that starts at key, as a number in (0, most].
static inline float uniform_of(uint64_t key, long v, float most) {
  uint64_t z = key + (uint64_t)(v + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z = z ^ (z >> 31);
  const float bits = (float)(int64_t)(z >> 11);
  return std::min((bits + 0.5f) * 0x1p-53f, most);
}

// log(x) of a normal x > 0 to about one unit in the last place, without a branch, so that the compiler vectorises loops.
static inline float log_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  const int32_t over = (bits & 0x7fffff) > 0x3504f3;  // a mantissa above sqrt(2)
  const float e = (float)((bits >> 23) - 127 + over);
  bits = (bits & 0x7fffff) | ((127 - over) << 23);
  memcpy(&x, &bits, 4);
  const float f = x - 1.0f, z = f * f;
  float y = 7.0376836292e-2f;
  y = y * f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  y = y * f * z - 2.12194440e-4f * e - 0.5f * z;
  return f + y + 0.693359375f * e;
}

// -log1p(-u), accurate for small u too, where 1 - u is 1 and the result is u.
static inline float exponential_of(float u) {
  const float w = 1.0f - u, d = 1.0f - w, tiny = (float)(d == 0.0f);
  return tiny * u - log_of(w) * (u / (d + tiny));
}

// keys (rows,) -> y (rows, count): uniform numbers in (0, most].
extern "C" void uniform(const int64_t* keys, float* y, long rows, long count, float most) {
  for (long row = 0; row < rows; row++)
    for (long v = 0; v < count; v++) y[row * count + v] = uniform_of((uint64_t)keys[row], v, most);
}

// The same as Gumbel noise: -log(-log1p(-u)).
extern "C" void gumbel(const int64_t* keys, float* y, long rows, long count, float most, long threads) {
  const long parts = (count + TOGETHER - 1) / TOGETHER;
  Team team(1, threads);
  team.start([&](Team::Member member) {
    member.share(rows * parts, [&](long part) {
      const uint64_t key = (uint64_t)keys[part / parts];
      float* to = y + part / parts * count;
      const long first = part % parts * TOGETHER, end = std::min(count, first + TOGETHER);
      for (long v = first; v < end; v++) to[v] = uniform_of(key, v, most);
      for (long v = first; v < end; v++) to[v] = exponential_of(to[v]);
      for (long v = first; v < end; v++) to[v] = -log_of(to[v]);
    });
  });
}
