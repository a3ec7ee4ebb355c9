// What a recurrent drafter does with accepted tokens: a new context, and a memory with the tokens in it.
#include <vector>

#include "arithmetic.h"
#include "draft.h"
#include "team.h"

namespace {

class Taker {
 public:
  Taker(const Network& network, const Taken& taken)
      : n(network), d(taken), all_tokens(d.rows * d.tokens), pairs(all_tokens, n.context + n.width, BITS, true),
        keys(new float[all_tokens * n.heads * n.size]), values(new float[all_tokens * n.heads * n.size]) {}

  void run() {
    Team team(4, d.threads);
    team.start([this](Team::Member member) {
      std::vector<float> part(all_tokens * LANES), line(n.context + n.width);
      member.share(d.rows, [&](long row) {
        long last = d.count[row] > 0 ? d.count[row] - 1 : 0;
        context(d.hidden + (row * d.tokens + last) * n.context, d.context + row * n.context);
      });
      if (!n.heads) return;
      member.share(all_tokens, [&](long i) { pair(i, line.data()); });
      long first = groups(n.key);
      member.share(2 * first, [&](long g) {
        if (g < first) outputs(n.key, g, pairs, nullptr, keys.get(), part.data());
        else outputs(n.value, g - first, pairs, nullptr, values.get(), part.data());
      });
      member.share(d.rows * n.heads, [&](long u) { remember(u); });
    });
  }

 private:
  const Network& n;
  const Taken& d;
  long all_tokens;
  Rows pairs;
  Numbers keys, values;

  void context(const float* hidden, float* to) const {
    long size = n.context / d.layers;
    for (long l = 0; l < d.layers; l++) rms_norm(hidden + l * size, nullptr, EPS, to + l * size, size);
  }

  void pair(long i, float* line) {
    context(d.hidden + i * n.context, line);
    embed(n, d.ids[i], line + n.context);
    pairs.fill(i, line, n.context + n.width);
  }

  // memory · γ^count + the sum of γ^age · key · value^T over the accepted tokens.
  void remember(long u) {
    long row = u / n.heads, h = u % n.heads, count = d.count[row], width = n.heads * n.size;
    float *memory = d.memory + u * n.size * n.size, fade = std::exp(n.log_decay[h] * (float)count);
    std::vector<float> by(count);
    for (long j = 0; j < count; j++) {
      const float* key = &keys[(row * d.tokens + j) * width + h * n.size];
      by[j] = std::exp(n.log_decay[h] * (float)(count - 1 - j)) / length(key, n.size);
    }
    for (long k = 0; k < n.size; k++)
      for (long m = 0; m < n.size; m += LANES) {
        vec sum = load(memory + k * n.size + m) * all(fade);
        for (long j = 0; j < count; j++) {
          long at = (row * d.tokens + j) * width + h * n.size;
          sum = fma(all(keys[at + k] * by[j]), load(&values[at + m]), sum);
        }
        store(memory + k * n.size + m, sum);
      }
  }
};

}  // namespace

extern "C" long run_take(const Network* network, const Taken* taken) {
  if (!has_rows(network->embedding, taken->ids, taken->rows * taken->tokens)) return OUTSIDE_VOCABULARY;
  if (!inside(taken->count, taken->rows, taken->tokens + 1)) return OUTSIDE_TENSOR;
  Taker(*network, *taken).run();
  return DONE;
}
