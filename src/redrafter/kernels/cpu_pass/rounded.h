// Products of 8-bit activations with 4-bit matrices, for a drafter, whose rounding never changes a text.
#pragma once
#include "product.h"

// Activations with their rounded twins: each 32 inputs of a token are bytes with one scale.
struct RoundedRows : Rows {
  std::unique_ptr<int8_t[]> bytes;  // (tiles, tokens, 32): of each 8 inputs the even ones, then the odd ones
  Numbers scales;                   // (tiles, tokens, 2): the scale, and the sum of the rounded inputs
  RoundedRows(long tokens, long columns)
      : Rows(tokens, columns), bytes(new int8_t[tiles * tokens * TILE]()), scales(new float[tiles * tokens * 2]()) {}
  // Numbers `from` and on of a token. `from` and `count` are multiples of 32.
  void put(long token, long from, const float* v, long count);
};

// As `product` for all tokens. Matrices of other formats than 4 bits with fp16 scales and minimums take the activations
// as they are.
void rounded_product(const Matrix& matrix, long group, const RoundedRows& input, float* y);

// As `outputs` for a matrix whose rows are a multiple of 16.
static inline void rounded_outputs(const Matrix& w, long group, const RoundedRows& input, const float* bias, float* y,
                                   float* part) {
  rounded_product(w, group, input, part);
  const vec more = bias ? load(bias + group * LANES) : zero();
  for (long t = 0; t < input.tokens; t++) store(y + t * w.rows + group * LANES, load(part + t * LANES) + more);
}
