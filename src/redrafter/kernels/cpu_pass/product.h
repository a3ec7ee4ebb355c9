// Products of activations with packed matrices.
#pragma once
#include <memory>

#include "formats.h"

using Numbers = std::unique_ptr<float[]>;
constexpr long TILE = 32;  // inputs whose activations lie together; every format's tiles fit into it

// Activations of several tokens, (tiles, tokens, 32): one address and constant distances reach a tile of all tokens.
struct Rows {
  long tokens, tiles;
  Numbers x;       // filled up with zeros to whole tiles
  Numbers totals;  // (tiles, tokens, 2): the sum of each 16 inputs
  Rows(long tokens, long columns)
      : tokens(tokens), tiles((columns + TILE - 1) / TILE), x(new float[tiles * tokens * TILE]()),
        totals(new float[tiles * tokens * 2]()) {}
  // Numbers `from` (a multiple of 16) and on of a token.
  void put(long token, long from, const float* v, long count) {
    for (long k = from; k < from + count; k += LANES, v += LANES) {
      long half = (k / TILE * tokens + token) * 2 + k / LANES % 2, left = from + count - k;
      memcpy(&x[half * LANES], v, (left < LANES ? left : LANES) * sizeof(float));
      totals[half] = sum(load(&x[half * LANES]));
    }
  }
};

// 16 outputs of every token: group `group` of the matrix -> y (tokens, 16). A token's result does not depend on the
// other tokens: tiles are added in order, by the same operations, however many tokens there are.
void product(const Matrix& matrix, long group, const Rows& input, float* y);

// One row of a matrix in fp32.
void matrix_row(const Matrix& matrix, long row, float* y);

INLINE long groups(const Matrix& w) { return (w.rows + LANES - 1) / LANES; }

// Outputs 16 · group and on of every token -> y (tokens, the matrix's rows). `part` has room for (tokens, 16).
static inline void outputs(const Matrix& w, long group, const Rows& input, const float* bias, float* y, float* part) {
  product(w, group, input, part);
  long from = group * LANES, count = w.rows - from < LANES ? w.rows - from : LANES;
  for (long t = 0; t < input.tokens; t++)
    for (long i = 0; i < count; i++) y[t * w.rows + from + i] = part[t * LANES + i] + (bias ? bias[from + i] : 0.0f);
}
