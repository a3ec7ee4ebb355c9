// The operations between a layer's products: RMS norm, rotation, attention of few queries over the KV cache.
#include <cmath>
#include <vector>

#include "skinny.h"
#include "tile.h"

// y = x / rms(x) · (weight + offset), row by row. `offset` is 1 for models that store weight − 1, else 0.
extern "C" void rms_norm(const float* x, const float* weight, float offset, float eps, float* y, long n, long size) {
  for (long t = 0; t < n; t++, x += size, y += size) {
    vec squares = {};
    long k = 0;
    for (; k + LANES <= size; k += LANES) squares += load(x + k) * load(x + k);
    float total = sum(squares);
    for (; k < size; k++) total += x[k] * x[k];
    float by = 1.0f / std::sqrt(total / size + eps);
    for (k = 0; k < size; k++) y[k] = x[k] * by * (weight[k] + offset);
  }
}

// out = x · cos + rotate_half(x) · sin
static void rotate(const float* x, const float* cos, const float* sin, float* out, long size) {
  long half = size / 2;
  for (long d = 0; d < half; d++) {
    float a = x[d], b = x[d + half];
    out[d] = a * cos[d] - b * sin[d];
    out[d + half] = b * cos[d + half] + a * sin[d + half];
  }
}

// Rotates queries (B, n, H, D) in place; writes rotated keys and plain values (B, n, K, D) into `slots` (B, n) of the
// KV cache. `row_step` and `head_step` are the cache's strides in numbers. cos and sin are (B, n, D).
extern "C" void rotate_and_store(float* q, const float* k, const float* v, const float* cos, const float* sin,
                                 const int64_t* slots, float* keys, float* values, long row_step, long head_step,
                                 long batch, long n, long heads, long kv_heads, long size) {
  for (long i = 0; i < batch * n; i++) {
    const float *c = cos + i * size, *s = sin + i * size;
    for (long h = 0; h < heads; h++) {
      float* own = q + (i * heads + h) * size;
      rotate(own, c, s, own, size);
    }
    for (long h = 0; h < kv_heads; h++) {
      long from = (i * kv_heads + h) * size, to = i / n * row_step + h * head_step + slots[i] * size;
      rotate(k + from, c, s, keys + to, size);
      memcpy(values + to, v + from, size * sizeof(float));
    }
  }
}

constexpr long BLOCK = 4;  // queries that share one read of a key

// Attention of T queries of one head over all keys and values of that head.
template <long T>
static void attend_some(const float* q, long q_step, const float* keys, const float* values, const float* mask,
                        long mask_step, float* out, long out_step, long slots, long size, float scale, float* p) {
  long s = 0;
  for (; s + ROWS <= slots; s += ROWS) {
    float y[ROWS][T];
    tile<ROWS, T>(q, q_step, keys + s * size, size, y);
    for (long r = 0; r < ROWS; r++)
      for (long t = 0; t < T; t++) p[t * slots + s + r] = y[r][t] * scale + mask[t * mask_step + s + r];
  }
  for (; s < slots; s++) {
    float y[1][T];
    tile<1, T>(q, q_step, keys + s * size, size, y);
    for (long t = 0; t < T; t++) p[t * slots + s] = y[0][t] * scale + mask[t * mask_step + s];
  }
  float by[T];
  for (long t = 0; t < T; t++) {
    float* own = p + t * slots;
    float top = own[0];
    for (s = 1; s < slots; s++) top = own[s] > top ? own[s] : top;
    vec total = {};
    for (s = 0; s + LANES <= slots; s += LANES) {
      vec e = exp(load(own + s) - top);
      store(own + s, e);
      total += e;
    }
    if (s < slots) {
      vec e = exp(load_part(own + s, slots - s) - top);
      memcpy(own + s, &e, (slots - s) * sizeof(float));
      total += load_part(own + s, slots - s);
    }
    by[t] = 1.0f / sum(total);
  }
  for (long d = 0; d < size; d += LANES) {
    long count = size - d < LANES ? size - d : LANES;
    vec acc[T] = {};
    if (count == LANES) {
      for (s = 0; s < slots; s++) {
        vec v = load(values + s * size + d);
        for (long t = 0; t < T; t++) acc[t] += v * p[t * slots + s];
      }
    } else {
      for (s = 0; s < slots; s++) {
        vec v = load_part(values + s * size + d, count);
        for (long t = 0; t < T; t++) acc[t] += v * p[t * slots + s];
      }
    }
    for (long t = 0; t < T; t++) {
      acc[t] *= by[t];
      memcpy(out + t * out_step + d, &acc[t], count * sizeof(float));
    }
  }
}

// softmax(q · keys^T · scale + mask) · values -> out (B, n, H, D). Several query heads may share a key head.
// Strides: q has one per row, head and query; keys and values one per row and head; the mask one per row and query.
extern "C" void attend(const float* q, long q_row, long q_head, long q_step, const float* keys, long k_row, long k_head,
                       const float* values, long v_row, long v_head, const float* mask, long mask_row, long mask_step,
                       float* out, long batch, long heads, long kv_heads, long n, long slots, long size, float scale,
                       long threads) {
  long parts = (n + BLOCK - 1) / BLOCK, group = heads / kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> p(BLOCK * slots);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < batch * heads * parts; i++) {
      long part = i % parts, h = i / parts % heads, b = i / parts / heads;
      long from = n * part / parts, count = n * (part + 1) / parts - from;
      const float* own = q + b * q_row + h * q_head + from * q_step;
      const float* k = keys + b * k_row + h / group * k_head;
      const float* v = values + b * v_row + h / group * v_head;
      const float* m = mask + b * mask_row + from * mask_step;
      float* o = out + ((b * n + from) * heads + h) * size;
      long step = heads * size;
      switch (count) {
        case 1: attend_some<1>(own, q_step, k, v, m, mask_step, o, step, slots, size, scale, p.data()); break;
        case 2: attend_some<2>(own, q_step, k, v, m, mask_step, o, step, slots, size, scale, p.data()); break;
        case 3: attend_some<3>(own, q_step, k, v, m, mask_step, o, step, slots, size, scale, p.data()); break;
        case 4: attend_some<4>(own, q_step, k, v, m, mask_step, o, step, slots, size, scale, p.data()); break;
      }
    }
  }
}

// Commits a path in `parts` tensors, `part_step` bytes apart. The tree's nodes lie in the slots from `lengths` (B,) on;
// nodes `path` (B, steps) move to the first of these slots. Sources and destinations overlap, so all are read before any
// is written. Sizes are in bytes, so that any dtype works.
extern "C" void move_path(char* cache, const int64_t* lengths, const int64_t* path, long parts, long part_step,
                          long batch, long heads, long steps, long row_step, long head_step, long size) {
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
}
