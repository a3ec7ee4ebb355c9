// A decoder layer whose weights are floats in torch's memory, whole and in parts, for passes of few tokens.
#include <algorithm>

#include "arithmetic.h"
#include "attention.h"
#include "indexes.h"
#include "linear.h"
#include "team.h"

namespace {

constexpr long MOST = 16;        // tokens
constexpr long CHUNK = 16;       // outputs at a time
constexpr long WORTH = 1 << 14;  // with fewer weights than this, waking threads costs more than they save

long chunks(long out) { return (out + CHUNK - 1) / CHUNK; }

// Up to three products of the same x.
template <typename End>
void products(Team::Member& member, const float* x, long n, long in, std::initializer_list<Linear> each, End end) {
  long count = 0;
  for (const Linear& l : each) count += chunks(l.out);
  member.share(count, [&](long c) {
    const Linear* l = each.begin();
    for (; c >= chunks(l->out); l++) c -= chunks(l->out);
    outputs(x, n, in, *l, c * CHUNK, std::min(l->out, (c + 1) * CHUNK));
  }, end);
}

void multiply(const float* x, long n, long in, std::initializer_list<Linear> each, long threads) {
  long weights = 0;
  for (const Linear& l : each) weights += l.out * in;
  Team team(1, weights < WORTH ? 1 : threads);
  team.start([&](Team::Member member) { products(member, x, n, in, each, [] {}); });
}

// y = silu(a) · b
void silu_times(const float* a, const float* b, float* y, long size) {
  long k = 0;
  for (; k + LANES <= size; k += LANES) store(y + k, silu(load(a + k)) * load(b + k));
  if (k < size) store_part(y + k, silu(load_part(a + k, size - k)) * load_part(b + k, size - k), size - k);
}

// down(silu(gate(x)) · up(x)) -> y. `inner` has room for (n, middle).
template <typename End>
void mlp(Team::Member& member, const float* x, const float* gate, const float* up, const float* down, float* inner,
         float* y, long n, long in, long middle, End end) {
  member.share(chunks(middle), [&](long c) {
    long from = c * CHUNK, count = std::min(middle - from, CHUNK);
    float both[2][MOST * CHUNK];
    outputs(x, n, in, {gate + from * in, nullptr, both[0], count}, 0, count);
    outputs(x, n, in, {up + from * in, nullptr, both[1], count}, 0, count);
    for (long t = 0; t < n; t++) silu_times(both[0] + t * count, both[1] + t * count, inner + t * middle + from, count);
  });
  products(member, inner, n, middle, {{down, nullptr, y, in}}, end);
}

// Keys and values (B, kv_heads, slots, size) of one layer; steps are in numbers.
struct Cache {
  const float *keys, *values;
  long row_step, head_step;
};

// The slots that each token sees: those where the additive mask is 0.
std::vector<Seen> seen_in(const float* mask, long mask_row, long mask_step, long batch, long n, long slots) {
  std::vector<Seen> found(batch * n);
  for (long t = 0; t < batch * n; t++) {
    const float* own = mask + t / n * mask_row + t % n * mask_step;
    for (long s = 0; s < slots; s++)
      if (own[s] == 0) {
        if (found[t].end == 0) found[t].shift = s;
        found[t].add(s);
      }
    if (found[t].size() == 0) found[t].add(0);  // a token that nobody reads
  }
  return found;
}

// softmax(q · keys^T · scale) · values over the slots that each token sees; q and out are (B, n, heads, size).
void attend(Team::Member& member, const float* q, const Cache& cache, const std::vector<Seen>& seen, long n, long heads,
            long kv_heads, long size, float scale, float* out) {
  long longest = 0, group = heads / kv_heads;
  for (const Seen& each : seen) longest = std::max(longest, each.size());
  const long room = longest + LANES;
  std::vector<float> scores(QUERIES * room);
  const long tokens = (long)seen.size(), width = heads * size;
  member.share(tokens * kv_heads, [&](long u) {  // head by head, as in pass.cpp
    long t = u % tokens, h = u / tokens, at = t / n * cache.row_step + h * cache.head_step;
    long own = t * width + h * group * size;
    attend_heads(q + own, cache.keys + at, cache.values + at, group, size, seen[t], scale, scores.data(), room,
                 out + own);
  });
}

void add(float* y, const float* x, long count) {
  for (long i = 0; i < count; i++) y[i] += x[i];
}

}  // namespace

// The same fields in the same order as in block.py.
struct Block {
  const float *before, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm, *o, *o_bias, *after, *gate, *up, *down;
  float before_eps, before_offset, head_eps, head_offset, after_eps, after_offset, scale;
  long hidden, heads, kv_heads, size, middle;
};

extern "C" {

void linear(const float* x, const float* w, const float* bias, float* y, long n, long in, long out, long threads) {
  multiply(x, n, in, {{w, bias, y, out}}, threads);
}

// Three products of the same x: queries, keys and values.
void linear3(const float* x, const float* w0, const float* b0, float* y0, long out0, const float* w1, const float* b1,
             float* y1, long out1, const float* w2, const float* b2, float* y2, long out2, long n, long in,
             long threads) {
  multiply(x, n, in, {{w0, b0, y0, out0}, {w1, b1, y1, out1}, {w2, b2, y2, out2}}, threads);
}

void gated(const float* x, const float* gate, const float* up, const float* down, float* y, long n, long in,
           long middle, long threads) {
  std::vector<float> inner(n * middle);
  Team team(2, threads);
  team.start([&](Team::Member member) { mlp(member, x, gate, up, down, inner.data(), y, n, in, middle, [] {}); });
}

// y = x / rms(x) · (weight + offset), row by row. `offset` is 1 for models that store weight − 1, else 0.
void norm(const float* x, const float* weight, float offset, float eps, float* y, long n, long size) {
  for (long t = 0; t < n; t++, x += size, y += size) {
    const float by = rms_factor(x, eps, size);
    for (long k = 0; k < size; k++) y[k] = x[k] * by * (weight[k] + offset);
  }
}

// Rotates queries (B, n, H, D) in place; writes rotated keys and plain values (B, n, K, D) into `slots` (B, n) of the
// KV cache. `row_step` and `head_step` are the cache's strides in numbers. cos and sin are (B, n, D).
long rotate_and_store(float* q, const float* k, const float* v, const float* cos, const float* sin,
                      const int64_t* slots, float* keys, float* values, long slot_count, long row_step, long head_step,
                      long batch, long n, long heads, long kv_heads, long size) {
  if (!inside(slots, batch * n, slot_count)) return OUTSIDE_TENSOR;
  const long half = size / 2;
  for (long i = 0; i < batch * n; i++) {
    const float *c = cos + i * size, *s = sin + i * size;
    for (long h = 0; h < heads; h++) {
      float* own = q + (i * heads + h) * size;
      rotate(own, c, s, half, own, size);
    }
    for (long h = 0; h < kv_heads; h++) {
      long from = (i * kv_heads + h) * size, to = i / n * row_step + h * head_step + slots[i] * size;
      rotate(k + from, c, s, half, keys + to, size);
      memcpy(values + to, v + from, size * sizeof(float));
    }
  }
  return DONE;
}

// Attention of q (B, n, H, D) over the first `slots` slots -> out (B, n, H, D). Several query heads may share a key head.
void attention(const float* q, const float* keys, const float* values, long row_step, long head_step, const float* mask,
               long mask_row, long mask_step, float* out, long batch, long heads, long kv_heads, long n, long slots,
               long size, float scale, long threads) {
  const auto seen = seen_in(mask, mask_row, mask_step, batch, n, slots);
  const Cache cache = {keys, values, row_step, head_step};
  Team team(1, threads);
  team.start([&](Team::Member member) { attend(member, q, cache, seen, n, heads, kv_heads, size, scale, out); });
}

// x (B, n, hidden) -> y: y = x + attention(norm(x)), then y + mlp(norm(y)). The KV cache has the layout of
// `rotate_and_store`, the mask that of `attention`.
long block(const Block* l, const float* x, float* y, const float* cos, const float* sin, const int64_t* slots,
           float* keys, float* values, long slot_count, long row_step, long head_step, const float* mask, long mask_row,
           long mask_step, long seen, long batch, long n, long threads) {
  if (seen > slot_count || !inside(slots, batch * n, slot_count)) return OUTSIDE_TENSOR;
  long t = batch * n, width = l->heads * l->size, kv_width = l->kv_heads * l->size;
  std::vector<float> room(t * (2 * l->hidden + 2 * width + 2 * kv_width + l->middle));
  float *normed = room.data(), *made = normed + t * l->hidden, *q = made + t * l->hidden, *k = q + t * width,
        *v = k + t * kv_width, *found = v + t * kv_width, *inner = found + t * width;
  const auto visible = seen_in(mask, mask_row, mask_step, batch, n, seen);
  norm(x, l->before, l->before_offset, l->before_eps, normed, t, l->hidden);
  Team team(5, threads);
  team.start([&](Team::Member member) {
    products(member, normed, t, l->hidden,
             {{l->q, l->q_bias, q, width}, {l->k, l->k_bias, k, kv_width}, {l->v, l->v_bias, v, kv_width}}, [&] {
      if (l->q_norm) {
        norm(q, l->q_norm, l->head_offset, l->head_eps, q, t * l->heads, l->size);
        norm(k, l->k_norm, l->head_offset, l->head_eps, k, t * l->kv_heads, l->size);
      }
      rotate_and_store(q, k, v, cos, sin, slots, keys, values, slot_count, row_step, head_step, batch, n, l->heads,
                       l->kv_heads, l->size);
    });
    attend(member, q, {keys, values, row_step, head_step}, visible, n, l->heads, l->kv_heads, l->size, l->scale, found);
    products(member, found, t, width, {{l->o, l->o_bias, y, l->hidden}}, [&] {
      add(y, x, t * l->hidden);
      norm(y, l->after, l->after_offset, l->after_eps, normed, t, l->hidden);
    });
    mlp(member, normed, l->gate, l->up, l->down, inner, made, t, l->hidden, l->middle,
        [&] { add(y, made, t * l->hidden); });
  });
  return DONE;
}

}  // extern "C"
