// A whole decoder layer in one call, so that Python runs once per layer and not between the products.
#include <vector>

#include "skinny.h"

// The same fields in the same order as in block.py.
struct Block {
  const float *before, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm, *o, *o_bias, *after, *gate, *up, *down;
  float before_eps, before_offset, head_eps, head_offset, after_eps, after_offset, scale;
  long hidden, heads, kv_heads, size, middle;
};

static void add(float* y, const float* x, long count) {
  for (long i = 0; i < count; i++) y[i] += x[i];
}

// x (B, n, hidden) -> y: y = x + attention(norm(x)), then y + mlp(norm(y)). The KV cache has the
// layout of `rotate_and_store`, the mask that of `attend`. Attention reads the first `seen` slots of the cache.
extern "C" void block(const Block* l, const float* x, float* y, const float* cos, const float* sin,
                      const int64_t* slots, float* keys, float* values, long row_step, long head_step,
                      const float* mask, long mask_row, long mask_step, long seen, long batch, long n, long threads) {
  long t = batch * n, width = l->heads * l->size, kv_width = l->kv_heads * l->size;
  std::vector<float> room(t * (2 * l->hidden + 2 * width + 2 * kv_width + l->middle));
  float *normed = room.data(), *made = normed + t * l->hidden, *q = made + t * l->hidden, *k = q + t * width,
        *v = k + t * kv_width, *found = v + t * kv_width, *inner = found + t * width;
  rms_norm(x, l->before, l->before_offset, l->before_eps, normed, t, l->hidden);
  linear3(normed, l->q, l->q_bias, q, width, l->k, l->k_bias, k, kv_width, l->v, l->v_bias, v, kv_width, t, l->hidden,
          threads);
  if (l->q_norm) {
    rms_norm(q, l->q_norm, l->head_offset, l->head_eps, q, t * l->heads, l->size);
    rms_norm(k, l->k_norm, l->head_offset, l->head_eps, k, t * l->kv_heads, l->size);
  }
  rotate_and_store(q, k, v, cos, sin, slots, keys, values, row_step, head_step, batch, n, l->heads, l->kv_heads,
                   l->size);
  attend(q, n * width, l->size, width, keys, row_step, head_step, values, row_step, head_step, mask, mask_row,
         mask_step, found, batch, l->heads, l->kv_heads, n, seen, l->size, l->scale, threads);
  linear(found, l->o, l->o_bias, y, t, width, l->hidden, threads);
  add(y, x, t * l->hidden);
  rms_norm(y, l->after, l->after_offset, l->after_eps, normed, t, l->hidden);
  gated(normed, l->gate, l->up, l->down, inner, made, t, l->hidden, l->middle, threads);
  add(y, made, t * l->hidden);
}
