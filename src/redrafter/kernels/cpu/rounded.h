// Products of activations in 8 bits.
#pragma once
#include "rows.h"

// 16 outputs of some tokens, as `product` gives them, for a quantised matrix and rounded activations.
void rounded_product(const Matrix& matrix, long group, const Rows& input, Span tokens, float* y);
