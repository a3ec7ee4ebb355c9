// The best few of many scores.
#pragma once
#include <cmath>
#include <vector>

#include "vector.h"

struct Scored {
  float score;
  long index;
};

// Keeps the `most` best of what it is shown, the best first; of equal scores, the earlier. NaN counts as -infinity.
class Best {
 public:
  explicit Best(long most) : most(most) {}
  float least() const { return (long)kept.size() < most ? -INFINITY : kept.back().score; }
  void show(float score, long index) {
    if (std::isnan(score)) score = -INFINITY;
    if (!(score > least()) && (long)kept.size() == most) return;
    long at = (long)kept.size();
    if (at == most) at--;
    else kept.push_back({});
    for (; at > 0 && kept[at - 1].score < score; at--) kept[at] = kept[at - 1];
    kept[at] = {score, index};
  }
  // Exactly `most` entries, whatever was shown: callers count on them.
  std::vector<Scored> filled() {
    while ((long)kept.size() < most) kept.push_back({-INFINITY, 0});
    return kept;
  }
  std::vector<Scored> kept;

 private:
  long most;
};

static inline float log_add(float a, float b) {
  const float high = std::fmax(a, b), low = std::fmin(a, b);
  return high == -INFINITY ? high : high + std::log1p(std::exp(low - high));
}

// log of the sum of e^logits (count,). `logits` has room for a multiple of 16.
static inline float log_sum(float* logits, long count) {
  for (long i = count; i % LANES; i++) logits[i] = -INFINITY;
  vec highest = load(logits);
  for (long i = LANES; i < count; i += LANES) highest = max(highest, load(logits + i));
  const float peak = top(highest);
  vec weight = zero();
  for (long i = 0; i < count; i += LANES) weight = weight + exp(load(logits + i) - all(peak));
  // What fills up the last vector is below everything: e^-87 each, and no number of a sum that is at least 1.
  return peak + std::log(sum(weight));
}

// The `most` best of logits (count,). `logits` has room for a multiple of 16.
static inline std::vector<Scored> highest_of(const float* logits, long count, long most) {
  Best best(most);
  for (long i = 0; i < count; i += LANES)
    if (top(load(logits + i)) > best.least())
      for (long j = i; j < i + LANES && j < count; j++) best.show(logits[j], j);
  return best.filled();
}

// log softmax of logits (count,) at its `most` best places.
static inline std::vector<Scored> best_of(float* logits, long count, long most) {
  const float total = log_sum(logits, count);
  auto best = highest_of(logits, count, most);
  for (auto& each : best) each.score -= total;
  return best;
}
