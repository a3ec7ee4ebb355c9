// A whole draft of a recurrent drafter in one call: beam search over the network, depth by depth.
#include "arithmetic.h"
#include "best.h"
#include "draft.h"
#include "team.h"

namespace {

constexpr long REFINED = 32;  // guesses of a beam whose scores are made again from unrounded weights

class Drafter {
 public:
  Drafter(const Network& network, const Draft& draft)
      : n(network), d(draft), most(d.rows * d.beams), heard(most, n.width, BITS, true), before(most, n.state, BITS, true),
        state(most, n.state, BITS, true), reading(most, n.heads * n.size, BITS, true), normed(most, n.exit, BITS, true),
        feature(most, n.width, BITS, true), context(d.rows, n.context, BITS, true),
        states(new float[most * n.state]), parents(new float[most * n.state]), query(new float[most * n.heads * n.size]),
        x(new float[most * n.exit]), line(new float[most * n.exit]), out(new float[most * n.width]),
        share(new float[d.rows * n.exit]), logits(new float[most * room()]), tokens(most), from(most),
        follows(d.rows, d.chain ? 0 : -1), totals(most), found(most), ends(d.length) {
    for (long row = 0; row < d.rows; row++) tokens[row] = d.last[row];
  }

  void run() {
    Team team(2 + d.length * (9 + n.block_count), d.threads);
    team.start([this](Team::Member member) {
      std::vector<float> part(3 * most * LANES);
      begin(member, part.data());
      for (long depth = 0; depth < d.length; depth++) {
        long beams = depth ? d.beams : 1, count = d.rows * beams;
        network(member, depth, beams, count, part.data());
        member.share(count, [&](long i) { score(depth, beams, i); });
        member.share(d.rows, [&](long row) { choose(depth, beams, row); }, [&] { ends[depth] = hopeless(); });
        if (ends[depth]) break;
      }
    });
    for (long depth = d.length; depth-- > 0;)
      if (ends[depth]) *d.found = depth + 1;
    if (d.chain) std::copy(follows.begin(), follows.end(), d.follows);
  }

 private:
  const Network& n;
  const Draft& d;
  long most;  // beams of all rows
  Rows heard, before, state, reading, normed, feature, context;
  Numbers states, parents, query, x, line, out, share, logits;
  std::vector<long> tokens, from;  // what each beam guessed last, and the beam it came from
  std::vector<long> follows;       // by row: the beam that has followed the chain so far; -1: none
  std::vector<float> totals;
  std::vector<std::vector<Scored>> found;
  std::vector<char> ends;  // by depth: whether the search ends there

  // Whether no row has a path that is probable enough to go on.
  bool hopeless() const {
    for (long row = 0; row < d.rows; row++)
      if (!(std::exp(totals[row * d.beams]) < d.until)) return false;
    return true;
  }

  long room() const { return (n.guesses + LANES - 1) / LANES * LANES; }

  // The state before the last token, and the context's part of the input projection.
  void begin(Team::Member& member, float* part) {
    member.share(d.rows, [&](long row) { context.fill(row, d.context + row * n.context, n.context); });
    long first = groups(n.from_context);
    member.share(first + groups(n.input_context), [&](long g) {
      if (g >= first) return outputs(n.input_context, g - first, context, n.input_bias, share.get(), part);
      product(n.from_context, g, context, part);
      for (long row = 0; row < d.rows; row++)
        store(&states[row * n.state + g * LANES], tanh(load(part + row * LANES) + load(n.context_bias + g * LANES)));
    });
  }

  // The network for `count` beams: logits of what may follow their tokens.
  void network(Team::Member& member, long depth, long beams, long count, float* part) {
    auto each = [count](auto work) {  // little work, for the thread that ends a part
      return [=] {
        for (long i = 0; i < count; i++) work(i);
      };
    };
    member.share(1, [&](long) {
      for (Rows* rows : {&heard, &before, &state, &reading, &normed, &feature}) rows->tokens = count;
      parents.swap(states);
      each([&](long i) { listen(depth, beams, i); })();
    });
    member.share(n.state / LANES, [&](long g) { advance(g, depth, beams, count, part); },
                 each([&](long i) { state.fill(i, &states[i * n.state], n.state); }));
    if (n.heads) {
      member.share(groups(n.query), [&](long g) { outputs(n.query, g, state, nullptr, query.get(), part); });
      member.share(count * n.heads, [&](long u) { remember(u, beams); });
    }
    const auto unit = [&](float scale) { return each([this, scale](long i) { norm(i, scale); }); };
    const float last = std::pow((float)n.exit, -0.25f);
    member.share(n.exit / LANES, [&](long g) { join(g, beams, count, part); }, unit(n.block_count ? 1.0f : last));
    for (long b = 0; b < n.block_count; b++)
      member.share(n.exit / LANES, [&](long g) { block(b, g, count, part); }, unit(b + 1 < n.block_count ? 1.0f : last));
    member.share(groups(n.head), [&](long g) { outputs(n.head, g, normed, nullptr, out.get(), part); },
                 each([&](long i) { feature.fill(i, &out[i * n.width], n.width); }));
    member.share(groups(n.vocabulary), [&](long g) {
      product(n.vocabulary, g, feature, part);
      for (long i = 0; i < count; i++) store(&logits[i * room() + g * LANES], load(part + i * LANES));
    });
  }

  // The state that beam i continues.
  const float* past(long depth, long beams, long i) const {
    return &parents[(depth > 1 ? i / beams * d.beams + from[i] : i / beams) * n.state];
  }

  void listen(long depth, long beams, long i) {
    embed(n, tokens[i], &out[i * n.width]);
    heard.fill(i, &out[i * n.width], n.width);
    before.fill(i, past(depth, beams, i), n.state);
  }

  // 16 numbers of every beam's new state: the old one mixed with silu(U s + W e + b), as a gate says.
  void advance(long g, long depth, long beams, long count, float* part) {
    float *more = part + most * LANES, *kept = more + most * LANES;
    for (long half = 0; half < 2; half++) {
      long group = g + half * (n.state / LANES);
      product(n.cell_u, group, before, part);
      product(n.cell_w, group, heard, more);
      for (long i = 0; i < count; i++) {
        vec mixed = load(part + i * LANES) + load(more + i * LANES) + load(n.cell_bias + group * LANES);
        if (half == 0) {
          store(kept + i * LANES, silu(mixed));
          continue;
        }
        vec old = load(past(depth, beams, i) + g * LANES);
        store(&states[i * n.state + g * LANES], fma(sigmoid(mixed), load(kept + i * LANES) - old, old));
      }
    }
  }

  // What one beam reads from one head of its row's memory.
  void remember(long u, long beams) {
    long i = u / n.heads, h = u % n.heads;
    const float* memory = d.memory + (i / beams * n.heads + h) * n.size * n.size;
    float* own = &query[u * n.size];
    const float by_length = 1.0f / length(own, n.size);
    std::vector<float> read(n.size);
    for (long k = 0; k < n.size; k += LANES) store(&read[k], zero());
    for (long j = 0; j < n.size; j++) {
      vec by = all(own[j] * by_length);
      for (long k = 0; k < n.size; k += LANES) store(&read[k], fma(by, load(memory + j * n.size + k), load(&read[k])));
    }
    rms_norm(read.data(), nullptr, 1.0f, read.data(), n.size);
    reading.fill(i, read.data(), n.size, h * n.size);
  }

  void join(long g, long beams, long count, float* part) {
    float* more = part + most * LANES;
    product(n.input_state, g, state, part);
    if (n.heads) product(n.input_memory, g, reading, more);
    for (long i = 0; i < count; i++) {
      vec made = load(part + i * LANES) + load(&share[i / beams * n.exit + g * LANES]);
      if (n.heads) made = made + load(more + i * LANES);
      store(&x[i * n.exit + g * LANES], made);
    }
  }

  // Beam i of x, brought to the size `scale`, for the next product.
  void norm(long i, float scale) {
    const vec by = all(rms_factor(&x[i * n.exit], EPS, n.exit) * scale);
    for (long k = 0; k < n.exit; k += LANES) store(&line[i * n.exit + k], load(&x[i * n.exit + k]) * by);
    normed.fill(i, &line[i * n.exit], n.exit);
  }

  void block(long b, long g, long count, float* part) {
    product(n.blocks[b], g, normed, part);
    for (long i = 0; i < count; i++) {
      float* own = &x[i * n.exit + g * LANES];
      store(own, load(own) + silu(load(part + i * LANES) + load(n.block_biases[b] + g * LANES)));
    }
  }

  // The odds of the chain's next token below beam i, if that beam has followed the chain so far.
  float odds(long depth, long beams, long i) const {
    long row = i / beams;
    return follows[row] == i % beams && depth < d.chain_length ? d.odds[row * d.chain_length + depth] : 0.0f;
  }

  // The best continuations of one beam, under the noise that the target will choose with.
  void score(long depth, long beams, long i) {
    long row = i / beams;
    float *own = &logits[i * room()], by = d.temperature[row] > 0 ? 1.0f / d.temperature[row] : 1.0f;
    const float* noise = d.noise ? d.noise + row * d.noise_row + depth * d.noise_step : nullptr;
    const float chance = odds(depth, beams, i);
    float plain = 0.0f;  // log of the sum of weights without noise
    if (noise) {
      for (long v = 0; v < n.guesses; v++) own[v] *= by;
      if (chance > 0) plain = log_sum(own, n.guesses);
      for (long v = 0; v < n.guesses; v++) own[v] += noise[n.token_ids ? n.token_ids[v] : v];
    }
    refine(own, &out[i * n.width], noise ? by : 1.0f, noise);
    if (chance > 0) {
      long token = d.chain[row * d.chain_length + depth];
      mix(i, own, token, chance, noise ? noise[token] : 0.0f, plain, noise != nullptr);
    } else {
      found[i] = best_of(own, n.guesses, d.beams);
    }
  }

  // The vocabulary has 4 bits, which is too few to decide between near scores: the best are made again from its floats.
  void refine(float* own, const float* feature, float by, const float* noise) const {
    for (const Scored& one : highest_of(own, n.guesses, std::min(n.guesses, std::max(REFINED, 2 * d.beams)))) {
      const float* row = n.vocabulary_rows + one.index * n.width;
      vec sum = zero();
      for (long k = 0; k < n.width; k += LANES) sum = fma(load(row + k), load(feature + k), sum);
      own[one.index] = ::sum(sum) * by + (noise ? noise[n.token_ids ? n.token_ids[one.index] : one.index] : 0.0f);
    }
  }

  // The same for a mixture: `token` with probability `chance`, otherwise what the network guesses (core/chain.py). All
  // scores fall by the same amount but the token's, which becomes a candidate of its own, with the index n.guesses.
  void mix(long i, float* own, long token, float chance, float noise, float plain, bool noisy) {
    const float norm = log_sum(own, n.guesses);
    float drafted = -INFINITY;
    for (long v = 0; v < n.guesses; v++)
      if ((n.token_ids ? n.token_ids[v] : v) == token) drafted = own[v] - norm;
    const float rest = std::log1p(-chance) + (noisy ? norm - plain : 0.0f), copied = std::log(chance) + noise;
    const float whole = log_add(rest, copied), shift = rest - whole;
    Best best(d.beams);
    best.show(log_add(drafted + shift, copied - whole), n.guesses);
    for (const Scored& one : best_of(own, n.guesses, d.beams))
      if ((n.token_ids ? n.token_ids[one.index] : one.index) != token) best.show(one.score + shift, one.index);
    found[i] = best.filled();
  }

  // The best paths of a row that are one token longer.
  void choose(long depth, long beams, long row) {
    Best best(d.beams);
    for (long w = 0; w < beams; w++)
      for (long j = 0; j < (long)found[row * beams + w].size(); j++)
        best.show((depth ? totals[row * d.beams + w] : 0.0f) + found[row * beams + w][j].score, w * d.beams + j);
    long following = -1;
    for (long w = 0; w < d.beams; w++) {
      const Scored& one = best.kept[w];
      long beam = one.index / d.beams, guess = found[row * beams + beam][one.index % d.beams].index;
      long at = (row * d.length + depth) * d.beams + w, token = 0;
      if (guess == n.guesses) token = d.chain[row * d.chain_length + depth], following = w;
      else token = n.token_ids ? n.token_ids[guess] : guess;
      tokens[row * d.beams + w] = d.tokens[at] = token;
      from[row * d.beams + w] = d.parents[at] = beam;
      totals[row * d.beams + w] = d.scores[at] = one.score;
    }
    follows[row] = following;
  }
};

}  // namespace

extern "C" long run_draft(const Network* network, const Draft* draft) {
  const Draft& d = *draft;
  if (!has_rows(network->embedding, d.last, d.rows)) return OUTSIDE_VOCABULARY;
  if (d.chain && !has_rows(network->embedding, d.chain, d.rows * d.chain_length)) return OUTSIDE_VOCABULARY;
  Drafter(*network, d).run();
  return DONE;
}
