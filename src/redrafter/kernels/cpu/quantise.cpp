// Rounds matrices to 8 bits with a scale a group, or to 4 bits with a scale and a minimum a group: `quantise` of
// matrices.py, with the same results.
#include <algorithm>
#include <cmath>

#include "team.h"

static float inverse(float by) { return by == 0 ? 0.0f : 1.0f / by; }

static void eight(const float* x, long group, int8_t* values, uint16_t& scale) {
  float most = 0;
  for (long k = 0; k < group; k++) most = std::max(most, std::fabs(x[k]));
  scale = float_to_half(most / 127);
  const float by = inverse(half_to_float(scale));
  for (long k = 0; k < group; k++) values[k] = (int8_t)std::min(std::max(std::nearbyint(x[k] * by), -127.0f), 127.0f);
}

static void four(const float* x, long group, int8_t* values, uint16_t& scale, uint16_t& least) {
  float low = x[0], high = x[0];
  for (long k = 1; k < group; k++) low = std::min(low, x[k]), high = std::max(high, x[k]);
  least = float_to_half(low);
  low = half_to_float(least);
  scale = float_to_half((high - low) / 15);
  const float by = inverse(half_to_float(scale));
  for (long k = 0; k < group; k++) values[k] = (int8_t)std::min(std::max(std::nearbyint((x[k] - low) * by), 0.0f), 15.0f);
}

// x (groups, group) -> values (groups, group), scales and, for 4 bits, minimums (groups,) in fp16.
extern "C" void quantise(long bits, const float* x, long groups, long group, int8_t* values, uint16_t* scales,
                         uint16_t* least, long threads) {
  constexpr long TOGETHER = 1024;
  Team team(1, threads);
  team.start([&](Team::Member member) {
    member.share((groups + TOGETHER - 1) / TOGETHER, [&](long part) {
      for (long g = part * TOGETHER; g < std::min(groups, (part + 1) * TOGETHER); g++)
        if (bits == 8) eight(x + g * group, group, values + g * group, scales[g]);
        else four(x + g * group, group, values + g * group, scales[g], least[g]);
    });
  });
}
