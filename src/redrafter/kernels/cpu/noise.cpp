// Random numbers as a function of a key and a number: splitmix64, as in core/noise.py.
#include <algorithm>
#include <cstdint>

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
