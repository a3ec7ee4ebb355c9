// y(n, out) = x(n, in) · W(out, in)^T for few rows of x. Each weight is read from memory once for all rows.
//
// The order of summation does not depend on n, so a token's output has the same bits alone (plain decoding) and beside
// other tokens (verification).
#include <cmath>
#include <vector>

#include "skinny.h"
#include "tile.h"

constexpr long WORTH = 1 << 14;  // with fewer weights than this, starting threads costs more than they save

struct Product {
  const float* w;
  const float* bias;  // may be null
  float* y;
  long out;
};

template <long R, long T>
static inline void rows_by_tokens(const float* x, long step, long in, const Product& p, long row, long token) {
  float y[R][T];
  tile<R, T>(x + token * step, step, p.w + row * in, in, y);
  for (long r = 0; r < R; r++)
    for (long t = 0; t < T; t++)
      p.y[(token + t) * p.out + row + r] = y[r][t] + (p.bias ? p.bias[row + r] : 0.0f);
}

template <long R>
static void rows(const float* x, long step, long n, long in, const Product& p, long row) {
  long parts = (n + TOKENS - 1) / TOKENS;
  for (long part = 0; part < parts; part++) {
    long from = n * part / parts, count = n * (part + 1) / parts - from;
    switch (count) {
      case 1: rows_by_tokens<R, 1>(x, step, in, p, row, from); break;
      case 2: rows_by_tokens<R, 2>(x, step, in, p, row, from); break;
      case 3: rows_by_tokens<R, 3>(x, step, in, p, row, from); break;
#if defined(__AVX512F__) || defined(__aarch64__)
      case 4: rows_by_tokens<R, 4>(x, step, in, p, row, from); break;
      case 5: rows_by_tokens<R, 5>(x, step, in, p, row, from); break;
      case 6: rows_by_tokens<R, 6>(x, step, in, p, row, from); break;
#endif
    }
  }
}

// Weight rows `from` to `to` of a product.
static void span(const float* x, long step, long n, long in, const Product& p, long from, long to) {
  long row = from;
  for (; row + ROWS <= to; row += ROWS) rows<ROWS>(x, step, n, in, p, row);
  for (; row < to; row++) rows<1>(x, step, n, in, p, row);
}

constexpr long MOST = 16;   // maximum number of rows of x
constexpr long CHUNK = 16;  // weight rows per chunk; each thread takes a contiguous range of chunks

// Up to three products of the same x, divided among the threads.
static void products(const float* x, long step, long n, long in, const Product* each, long count, long threads) {
  long chunks[4] = {};
  for (long i = 0; i < count; i++) chunks[i + 1] = chunks[i] + (each[i].out + CHUNK - 1) / CHUNK;
  long total = chunks[count];
  if (total * CHUNK * in < WORTH) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long c = 0; c < total; c++) {
    long i = 0;
    while (c >= chunks[i + 1]) i++;
    long from = (c - chunks[i]) * CHUNK, to = from + CHUNK;
    span(x, step, n, in, each[i], from, to < each[i].out ? to : each[i].out);
  }
}

// y = silu(a) · b
static void silu_times(const float* a, const float* b, float* y, long size) {
  long k = 0;
  for (; k + LANES <= size; k += LANES) {
    vec v = load(a + k);
    store(y + k, v / (1.0f + exp(-v)) * load(b + k));
  }
  if (k < size) {
    vec v = load_part(a + k, size - k);
    v = v / (1.0f + exp(-v)) * load_part(b + k, size - k);
    memcpy(y + k, &v, (size - k) * sizeof(float));
  }
}

extern "C" void linear(const float* x, const float* w, const float* bias, float* y, long n, long in, long out,
                       long threads) {
  Product p = {w, bias, y, out};
  products(x, in, n, in, &p, 1, threads);
}

// down(silu(gate(x)) · up(x)) in one parallel region. `inner` is scratch memory for (n, middle).
extern "C" void gated(const float* x, const float* gate, const float* up, const float* down, float* inner, float* y,
                      long n, long in, long middle, long threads) {
  Product d = {down, nullptr, y, in};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (long from = 0; from < middle; from += CHUNK) {
      long count = middle - from < CHUNK ? middle - from : CHUNK;
      float both[2][MOST * CHUNK];
      Product g = {gate + from * in, nullptr, both[0], count};
      Product u = {up + from * in, nullptr, both[1], count};
      span(x, in, n, in, g, 0, count);
      span(x, in, n, in, u, 0, count);
      for (long t = 0; t < n; t++) silu_times(both[0] + t * count, both[1] + t * count, inner + t * middle + from, count);
    }
#pragma omp for schedule(static)
    for (long from = 0; from < in; from += CHUNK) span(inner, middle, n, middle, d, from, in - from < CHUNK ? in : from + CHUNK);
  }
}

// Three products of the same x: queries, keys and values.
extern "C" void linear3(const float* x, const float* w0, const float* b0, float* y0, long out0, const float* w1,
                        const float* b1, float* y1, long out1, const float* w2, const float* b2, float* y2, long out2,
                        long n, long in, long threads) {
  Product each[3] = {{w0, b0, y0, out0}, {w1, b1, y1, out1}, {w2, b2, y2, out2}};
  products(x, in, n, in, each, 3, threads);
}
