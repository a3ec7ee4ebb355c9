// Products of activations with packed matrices.
#pragma once
#include <algorithm>

#include "indexes.h"
#include "rows.h"

// Outputs of some tokens: `count` groups from `group` of the matrix on -> y (count, tokens of the span, 16). A token's result
// does not depend on the other tokens: tiles are added in order, by the same operations, however many tokens there are.
// Quantised matrices are multiplied with rounded activations where the input has them, floats never.
void product(const Matrix& matrix, long group, long count, const Rows& input, Span tokens, float* y);
static inline void product(const Matrix& matrix, long group, const Rows& input, float* y) {
  product(matrix, group, 1, input, {0, input.tokens}, y);
}

// One row of a matrix in fp32.
void matrix_row(const Matrix& matrix, long row, float* y);

INLINE long groups(const Matrix& w) { return (w.rows + LANES - 1) / LANES; }

// A unit of a matrix's outputs is what a thread multiplies at once: a few groups.
INLINE long output_units(const Matrix& w, const Rows& input) { return (groups(w) + input.together - 1) / input.together; }

// Unit `unit` of the outputs of some tokens -> y (all tokens, the matrix's rows). `part` has room for (together, span, 16).
static inline void outputs(const Matrix& w, long unit, const Rows& input, Span tokens, const float* bias, float* y,
                           float* part, const int64_t* places = nullptr) {
  const long first = unit * input.together, end = std::min(groups(w), first + input.together);
  product(w, first, end - first, input, tokens, part);
  for (long group = first; group < end; group++) {
    long from = group * LANES, count = w.rows - from < LANES ? w.rows - from : LANES;
    const bool whole = count == LANES;
    const vec more = whole && bias ? load(bias + from) : zero();
    for (long t = tokens.from; t < tokens.to; t++, part += LANES) {
      float* own = y + (places ? places[t] : t) * w.rows + from;
      if (whole) store(own, load(part) + more);
      else for (long i = 0; i < count; i++) own[i] = part[i] + (bias ? bias[from + i] : 0.0f);
    }
  }
}
static inline void outputs(const Matrix& w, long unit, const Rows& input, const float* bias, float* y, float* part) {
  outputs(w, unit, input, {0, input.tokens}, bias, y, part);
}

// Whether the matrix has all rows `ids` (count,).
static inline bool has_rows(const Matrix& m, const int64_t* ids, long count) { return inside(ids, count, m.rows); }
