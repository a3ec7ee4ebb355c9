// A model and a pass as Python hands them over: the same fields in the same order as in model.py.
#pragma once
#include "product.h"

// Pointers may be null where a model has no such part.
struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *q_bias, *k_bias, *v_bias, *o_bias;
  const float *before, *q_norm, *k_norm, *after_attention, *before_mlp, *after_mlp;  // weights of RMS norms
  long rotation;  // which of the pass's tables of rotations
  long window;    // most positions that a token sees, its own included; 0: all
};

enum Gate { SILU = 0, GELU = 1 };

struct Model {
  const Layer* layers;
  long layer_count, hidden, heads, kv_heads, size, middle, gate;
  Matrix embedding, head;
  const float* final_norm;
  float eps, scale, embedding_scale, residual_scale, logit_scale;
};

// Columns of a token's line, as in tree_attention/naive.py: its id; its rotary position; how many tokens of its text come
// before it; a window, which the layers know by themselves; its row's place in the KV cache; the slot of its key; then the
// slots of its newest keys, -1 where its text has fewer. All older keys are in the slots of their indices.
enum Column { TOKEN, POSITION, INDEX, WINDOW, PLACE, SLOT, SLOTS };

// One pass over tokens of any mixture of rows.
struct Pass {
  const int64_t* lines;                // (tokens, columns)
  long tokens, columns;
  const float *const *cos, *const *sin;  // tables of rotations: (rotation_count, head size / 2) each
  long rotation_count;
  void *const *keys, *const *values;   // by layer: (places, kv heads, slots, size), as `cache` says
  long row_step, head_step;            // of keys and values, in numbers
  long places, slots;
  const int64_t* wanted;               // hidden states to return: i is the input of layer i, the last one is normed
  long wanted_count;
  float* hidden;                       // (tokens, wanted_count, hidden)
  const int64_t *kept, *into;          // (kept_count,) tokens whose logits are wanted, and where these go
  long kept_count;
  float* logits;                       // (logit_rows, vocabulary)
  long logit_rows, threads;
  long cache;   // a CacheKind
  long bits;    // of the activations that are multiplied with quantised matrices: 8, 16, or 0 for fp32

  long at(long token, Column column) const { return lines[token * columns + column]; }
};

enum CacheKind { FP32 = 0, FP16 = 1, INT8 = 2 };  // of keys and values; INT8: with a scale behind each head, see cache.h
