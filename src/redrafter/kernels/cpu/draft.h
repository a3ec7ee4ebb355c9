// A recurrent drafter and one draft as Python hands them over: the same fields in the same order as in draft.py.
#pragma once
#include "arithmetic.h"
#include "product.h"

struct Network {
  Matrix cell_u, cell_w, from_context, query;  // the gated cell; the first state; what reads the memory
  Matrix key, value;                           // what the memory is made of
  Matrix input_state, input_context, input_memory, head, vocabulary;
  Matrix embedding;  // the target's input embedding
  const Matrix* blocks;
  const float *cell_bias, *context_bias, *input_bias;
  const float* const* block_biases;
  const float* log_decay;    // (heads,) of the memory
  const float* vocabulary_rows;  // (guesses, width): the vocabulary before it was rounded
  const int64_t* token_ids;      // (guesses,) the tokens that the drafter guesses among; null: all
  long state, exit, context, width, heads, size, block_count, guesses;  // width: of an embedding; size: of a memory head
  float embedding_scale;
};

struct Draft {
  const float* context;  // (rows, context)
  const float* memory;   // (rows, heads, size, size)
  const int64_t* last;   // (rows,)
  const float* temperature;  // (rows,)
  const float* noise;        // (rows, length or more, vocabulary); null: none
  const int64_t* chain;      // (rows, chain_length): tokens from another source, mixed into the search; null: none
  const float* odds;         // (rows, chain_length): the probability of each if those before it are right; 0: no chain
  long noise_row, noise_step;
  long rows, beams, length, chain_length, threads;
  int64_t *tokens, *parents;  // (rows, length, beams)
  float* scores;
  int64_t* follows;  // (rows,): the beam of the last depth that has followed the chain all along; -1: none
  long* found;       // depths that were searched
  float until;       // the search ends where every row's best path is less probable than this
};

// What a step accepted. The memory takes in the first `count` of `tokens` tokens of each row.
struct Taken {
  const float* hidden;      // (rows, tokens, context): the target's hidden states that chose the tokens
  const int64_t* ids;       // (rows, tokens)
  const int64_t* count;     // (rows,)
  float *context, *memory;  // (rows, context) and (rows, heads, size, size), both overwritten
  long rows, tokens, layers, threads;  // layers: hidden states that a context is made of, each brought to unit size
};

constexpr long BITS = 8;  // of activations
constexpr float EPS = 1.1920929e-07f;  // of torch's rms_norm in fp32

// A token's embedding, brought to unit size.
static inline void embed(const Network& n, long token, float* y) {
  matrix_row(n.embedding, token, y);
  for (long k = 0; k < n.width; k++) y[k] *= n.embedding_scale;
  rms_norm(y, nullptr, EPS, y, n.width);
}
