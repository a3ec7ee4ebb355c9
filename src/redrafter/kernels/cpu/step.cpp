// What a step does besides passes: committing a path, and random numbers for choices at a temperature.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "indexes.h"

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

// splitmix64, as in core/noise.py.
// keys (rows,) -> y (rows, count): for v = 1, 2, ... the upper 53 bits of mix(key + v · golden) as a number in (0, most].
extern "C" void uniform(const int64_t* keys, float* y, long rows, long count, float most) {
  for (long row = 0; row < rows; row++) {
    const uint64_t key = (uint64_t)keys[row];
    for (long v = 0; v < count; v++) {
      uint64_t z = key + (uint64_t)(v + 1) * 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      z = z ^ (z >> 31);
      const float bits = (float)(int64_t)(z >> 11);
      y[row * count + v] = std::min((bits + 0.5f) * 0x1p-53f, most);
    }
  }
}
