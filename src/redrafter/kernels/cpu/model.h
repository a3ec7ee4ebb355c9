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
  float eps, scale, embedding_scale;
};

// One pass over `rows` rows of `nodes` tokens. Arrays have one entry for each token unless said otherwise.
struct Pass {
  const int64_t *tokens, *positions, *slots;
  const uint8_t* visible;        // (rows, nodes, extent): which slots each token sees; null: all up to its own
  long visible_row, visible_step;
  const int64_t* key_positions;  // (rows, extent): for windows; null: a slot's number is its position
  long extent;
  const float *const *cos, *const *sin;  // tables of rotations: (rotation_count, head size / 2) each
  long rotation_count;
  void *const *keys, *const *values;   // by layer: (rows, kv heads, slots, size), as `cache` says
  long row_step, head_step;            // of keys and values, in numbers
  long slot_count;
  const int64_t* wanted;               // hidden states to return: i is the input of layer i, the last one is normed
  long wanted_count;
  float* hidden;                       // (tokens, wanted_count, hidden)
  const int64_t* kept;                 // tokens whose logits are wanted
  long kept_count;
  float* logits;                       // (kept_count, vocabulary)
  long rows, nodes, threads;
  const int64_t* real;  // which of the rows · nodes tokens to run, where not all, with the logits of each; null: all
  long real_count;
  long cache;   // a CacheKind
  long rounds;  // whether activations are rounded to 8 bits before they are multiplied with quantised matrices
};

enum CacheKind { FP32 = 0, FP16 = 1, INT8 = 2 };  // of keys and values; INT8: with a scale behind each head, see cache.h
