// A whole pass of a decoder-only model in one call: embedding, layers, final norm, output embedding.
//
// What is computed for one token and one output depends neither on the other tokens nor on how threads share the work.
#include <algorithm>

#include "arithmetic.h"
#include "attention.h"
#include "joint_attention.h"
#include "model.h"
#include "team.h"

namespace {

vec gated(vec x, long kind) {
  if (kind == SILU) return silu(x);
  // GELU by tanh: x/2 · (1 + tanh u) = x · (1 - 1 / (e^2u + 1)), u = sqrt(2/π) · (x + 0.044715 x³)
  vec u = x * fma(x * x, all(0.044715f * 0.7978845608f), all(0.7978845608f));
  return x - x / (exp(u + u) + all(1.0f));
}

// What a token sees; `window` limits it to the newest.
Seen seen_by(const Pass& p, long token, long window) {
  const int64_t* newest = p.lines + token * p.columns + SLOTS;
  const long end = p.at(token, INDEX) + 1, older = end - (p.columns - SLOTS);
  Seen seen;
  seen.first = window && end > window ? end - window : 0;
  seen.end = seen.straight = std::max(seen.first, older);
  while (seen.end < end) seen.add(newest[seen.end - older]);
  return seen;
}

// What a thread attends to at once: pairs `from` to `to` of a token and a head, token by token, counted from a token and the
// first head of a key head. Where there are too few for joint attention, those of one token.
struct Unit {
  long token, kv_head, from, to;
  bool joint;
};

constexpr long FEW = 8;  // tokens

struct alignas(64) Lanes {  // outputs of a token
  float lane[LANES];
};

class Runner {
 public:
  Runner(const Model& model, const Pass& pass)
      : m(model), p(pass), tokens(p.tokens), group(m.heads / m.kv_heads), normed(tokens, m.hidden, p.bits, plain(model)),
        found(tokens, m.heads * m.size, p.bits, plain(model)), inner(tokens, m.middle, p.bits, plain(model)),
        kept(p.kept_count, m.hidden, p.bits, plain(model)), x(new float[tokens * m.hidden]), q(new float[tokens * m.heads * m.size]),
        k(new float[tokens * m.kv_heads * m.size]), v(new float[tokens * m.kv_heads * m.size]),
        out(new float[tokens * m.hidden]) {
    for (long t = 0; t < tokens; t++) far.push_back(seen_by(p, t, 0));
    for (long l = 0; l < m.layer_count; l++)
      if (m.layers[l].window && near.empty())
        for (long t = 0; t < tokens; t++) near.push_back(seen_by(p, t, m.layers[l].window));
    divide();
  }

  void run() {
    Team team(10 * m.layer_count + 3, p.threads);
    team.start([this](Team::Member member) {
      const long room = std::max(QUERIES * (longest + LANES) + group * m.size, joint_room(reach, m.size));
      std::vector<Lanes> part(std::max(4 * tokens, 2 * kept.tokens));
      std::vector<float> scores(room);
      member.share(tokens, [&](long t) { embed(t), begin(0, t); });
      for (long l = 0; l < m.layer_count; l++) layer(member, l, part.data()->lane, scores.data());
      member.share(kept.tokens, [&](long i) { keep_for_head(i); });
      member.share(output_units(m.head, kept), [&](long u) {
        outputs(m.head, u, kept, {0, kept.tokens}, nullptr, p.logits, part.data()->lane, p.into);
      });
    });
  }

 private:
  const Model& m;
  const Pass& p;
  long tokens, group;           // group: heads that share a key head
  long longest = 0, reach = 0;  // most slots that a token sees; joint attention reads no slot from `reach` on
  Rows normed, found, inner, kept;
  Numbers x, q, k, v, out;
  std::vector<Seen> far, near;  // visible slots of each token, in layers without and with a window
  std::vector<Unit> units;      // head by head, so that a head's keys and values stay in the L2 cache

  // Whether any matrix has floats, which take activations as they are.
  static bool plain(const Model& m) {
    bool any = !is_quantised(m.head);
    for (const Layer* l = m.layers; l < m.layers + m.layer_count; l++)
      for (const Matrix* w : {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down}) any = any || !is_quantised(*w);
    return any;
  }

  // Neighbouring tokens of a row are attended to together, if they are enough to fill half of a vector.
  void divide() {
    for (auto& each : far) longest = std::max(longest, each.size());
    std::vector<Unit> parts;
    for (long t = 0, next; t < tokens; t = next) {
      for (next = t; next < tokens && p.at(next, PLACE) == p.at(t, PLACE) && joins(far[next]);) next++;
      const long pairs = (next - t) * group;
      const bool joint = next > t + 1 && 2 * pairs >= LANES;
      if (joint) {
        for (long i = t; i < next; i++) reach = std::max(reach, far[i].reach());
        for (long i = 0; i < pairs; i += LANES) parts.push_back({t, 0, i, std::min(pairs, i + LANES), true});
      } else {
        next = t + 1;
        parts.push_back({t, 0, 0, group, false});
      }
    }
    for (long h = 0; h < m.kv_heads; h++)
      for (Unit part : parts) part.kv_head = h, units.push_back(part);
  }

  // work(u) for every u below `count`, then each(i) for every i below `after`.
  template <typename Work, typename Each>
  void share(Team::Member& member, long count, Work work, long after, Each each) {
    if (tokens <= FEW) {  // waiting for other threads would take longer
      member.share(count, work, [&] {
        for (long i = 0; i < after; i++) each(i);
      });
    } else {
      member.share(count, work);
      member.share(after, each);
    }
  }

  // The same with work(unit, span) for `count` units of outputs and every block of tokens. Block after block, so that the
  // activations of a block stay in the L1 cache.
  template <typename Work, typename Each>
  void products(Team::Member& member, long count, Work work, long after, Each each) {
    const auto each_block = [&](long u) { work(u % count, normed.tokens_of(u / count)); };
    share(member, count * normed.count_blocks(), each_block, after, each);
  }

  void layer(Team::Member& member, long index, float* part, float* scores) {
    const Layer& l = m.layers[index];
    long q_units = output_units(l.q, normed), k_units = output_units(l.k, normed), heads = tokens * m.kv_heads;
    auto qkv = [&](long u, Span span) {
      if (u < q_units) outputs(l.q, u, normed, span, l.q_bias, q.get(), part);
      else if (u < q_units + k_units) outputs(l.k, u - q_units, normed, span, l.k_bias, k.get(), part);
      else outputs(l.v, u - q_units - k_units, normed, span, l.v_bias, v.get(), part);
    };
    products(member, q_units + k_units + output_units(l.v, normed), qkv, heads, [&](long u) { store_keys(l, index, u); });
    auto attend = [&](long u) { attention(l, index, units[u], scores); };
    share(member, units.size(), attend, whole_tiles() ? 0 : tokens, [&](long t) { fill_found(t, 0, m.heads); });
    auto o = [&](long u, Span span) { outputs(l.o, u, found, span, l.o_bias, out.get(), part); };
    products(member, output_units(l.o, found), o, tokens, [&](long t) { add(t, l.after_attention), norm(t, l.before_mlp); });
    auto gate = [&](long tile, Span span) { mlp(l, tile, span, part); };
    products(member, inner.tiles, gate, 0, [](long) {});
    auto down = [&](long u, Span span) { outputs(l.down, u, inner, span, nullptr, out.get(), part); };
    products(member, output_units(l.down, inner), down, tokens, [&](long t) { add(t, l.after_mlp), begin(index + 1, t); });
  }

  void embed(long t) {
    matrix_row(m.embedding, p.at(t, TOKEN), &x[t * m.hidden]);
    for (long d = 0; d < m.hidden; d++) x[t * m.hidden + d] *= m.embedding_scale;
  }

  // What comes before the products of a layer, or after the last layer.
  void begin(long index, long t) {
    if (index < m.layer_count) {
      keep(index, &x[t * m.hidden], t);
      norm(t, m.layers[index].before);
    } else {
      norm(t, m.final_norm);
      keep(index, &out[t * m.hidden], t);
    }
  }

  void keep(long index, const float* from, long t) {
    for (long i = 0; i < p.wanted_count; i++)
      if (p.wanted[i] == index)
        memcpy(p.hidden + (t * p.wanted_count + i) * m.hidden, from, m.hidden * sizeof(float));
  }

  // The final norm of a token whose logits are wanted. The head's weights keep their scale: its input is scaled instead.
  void keep_for_head(long i) {
    float* last = &out[p.kept[i] * m.hidden];
    if (m.logit_scale == 1.0f) return kept.fill(i, last, m.hidden);
    float* scaled = &x[p.kept[i] * m.hidden];  // x has served its purpose
    for (long d = 0; d < m.hidden; d++) scaled[d] = last[d] * m.logit_scale;
    kept.fill(i, scaled, m.hidden);
  }

  // The norm of a token's x, for the next product. `out` has served its purpose when a norm is due.
  void norm(long t, const float* weight) {
    rms_norm(&x[t * m.hidden], weight, m.eps, &out[t * m.hidden], m.hidden);
    normed.fill(t, &out[t * m.hidden], m.hidden);
  }

  // x += out, through a norm if the model has one here.
  void add(long t, const float* weight) {
    float *own = &x[t * m.hidden], *made = &out[t * m.hidden];
    if (weight) rms_norm(made, weight, m.eps, made, m.hidden);
    for (long d = 0; d < m.hidden; d++) own[d] += made[d] * m.residual_scale;
  }

  // Rotated queries of one token and key head; the rotated key, and the value, in the KV cache.
  void store_keys(const Layer& l, long index, long u) {
    const long half = m.size / 2, t = u / m.kv_heads, h = u % m.kv_heads;
    const long turn = p.at(t, POSITION) * half;
    const float *cos = p.cos[l.rotation] + turn, *sin = p.sin[l.rotation] + turn;
    for (long i = 0; i < group; i++) {
      float* own = &q[(u * group + i) * m.size];
      if (l.q_norm) rms_norm(own, l.q_norm, m.eps, own, m.size);
      rotate(own, cos, sin, 0, own, m.size);
    }
    float* key = &k[u * m.size];
    const long row = keys_of(t, h);
    if (l.k_norm) rms_norm(key, l.k_norm, m.eps, key, m.size);
    rotate(key, cos, sin, 0, key, m.size);
    each_kind([&](auto number) {
      using Number = decltype(number);
      const long to = row + p.at(t, SLOT) * Slot<Number>::step(m.size);
      write_head((Number*)p.keys[index] + to, key, m.size);
      write_head((Number*)p.values[index] + to, &v[u * m.size], m.size);
    });
  }

  // work(a number of the KV cache's type).
  template <typename Work>
  void each_kind(Work work) const {
    switch (p.cache) {
      case FP16: return work(uint16_t{});
      case INT8: return work(int8_t{});
      default: return work(float{});
    }
  }

  // Where the keys and values of a token's row and a key head begin.
  long keys_of(long t, long kv_head) const { return p.at(t, PLACE) * p.row_step + kv_head * p.head_step; }

  // The query of a pair. Those of a token's other heads follow.
  float* query(const Unit& unit, long pair) const {
    return &q[((unit.token + pair / group) * m.heads + unit.kv_head * group + pair % group) * m.size];
  }

  // Results take the places of their queries.
  void attention(const Layer& l, long index, const Unit& unit, float* scratch) {
    const std::vector<Seen>& seen = l.window ? near : far;
    const long at = keys_of(unit.token, unit.kv_head), count = unit.to - unit.from;
    each_kind([&](auto number) {
      auto *keys = (const decltype(number)*)p.keys[index] + at, *values = (const decltype(number)*)p.values[index] + at;
      if (unit.joint) {
        Pair pairs[LANES];
        for (long i = 0; i < count; i++)
          pairs[i] = {query(unit, unit.from + i), &seen[unit.token + (unit.from + i) / group]};
        attend_pairs(pairs, count, keys, values, m.size, m.scale, scratch);
      } else {
        const long room = longest + LANES;
        float *own = query(unit, 0), *made = scratch + QUERIES * room;
        attend_heads(own, keys, values, group, m.size, seen[unit.token], m.scale, scratch, room, made);
        memcpy(own, made, group * m.size * sizeof(float));
      }
    });
    if (whole_tiles())
      for (long i = unit.from; i < unit.to; i++) fill_found(unit.token + i / group, unit.kv_head * group + i % group, 1);
  }

  // Whether the results of every head are whole tiles of activations.
  bool whole_tiles() const { return m.size % TILE == 0; }

  // Some heads' results of a token, which lie where their queries were, for the next product.
  void fill_found(long t, long head, long count) {
    found.fill(t, &q[(t * m.heads + head) * m.size], count * m.size, head * m.size);
  }

  // 32 gated numbers of some tokens.
  void mlp(const Layer& l, long tile, Span span, float* part) {
    const long step = (span.to - span.from) * LANES, count = std::min(2L, groups(l.gate) - 2 * tile);
    const float* up = part + count * step;
    product(l.gate, 2 * tile, count, normed, span, part);
    product(l.up, 2 * tile, count, normed, span, part + count * step);
    for (long t = 0; t < span.to - span.from; t++) {
      const auto made = [&](const float* gate, const float* up) {
        return gated(load(gate + t * LANES), m.gate) * load(up + t * LANES);
      };
      inner.put(span.from + t, tile, made(part, up), count > 1 ? made(part + step, up + step) : zero());
    }
  }
};

}  // namespace

extern "C" long run_pass(const Model* model, const Pass* pass) {
  const Pass& p = *pass;
  const long newest = p.columns - SLOTS;
  if (newest < 1 || !inside(p.kept, p.kept_count, p.tokens) || !inside(p.into, p.kept_count, p.logit_rows))
    return OUTSIDE_TENSOR;
  for (long t = 0; t < p.tokens; t++) {
    const int64_t* line = p.lines + t * p.columns;
    if (!has_rows(model->embedding, line + TOKEN, 1)) return OUTSIDE_VOCABULARY;
    const bool fits = inside(line + POSITION, 1, p.rotation_count) && inside(line + INDEX, 1, p.slots) &&
                      inside(line + PLACE, 1, p.places) && inside(line + SLOT, 1, p.slots);
    if (!fits) return OUTSIDE_TENSOR;
    const long seen = std::min(newest, (long)line[INDEX] + 1);
    if (!inside(line + p.columns - seen, seen, p.slots)) return OUTSIDE_TENSOR;
  }
  Runner(*model, p).run();
  return DONE;
}
