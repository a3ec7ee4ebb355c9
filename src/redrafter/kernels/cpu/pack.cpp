// Packs matrices into the layout of formats.h, and reads their rows back.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")  // packing runs once; with -O3 GCC spends 15 s on its loops
#endif
#include <type_traits>
#include <vector>

#include "product.h"
#include "team.h"

template <typename Work>
static void in_parallel(long threads, long count, Work work) {
  Team team(1, threads);
  team.start([&](Team::Member member) { member.share(count, work); });
}

template <typename F>
static long size_of(long rows, long columns) {
  long groups = (rows + LANES - 1) / LANES, tiles = (columns + F::INPUTS - 1) / F::INPUTS;
  return groups * tiles * (long)sizeof(typename F::Tile);
}

// Bytes of a packed matrix. -1: there is no such format.
extern "C" long packed_bytes(long format, long rows, long columns) {
  switch (format) {
    FOR_QUANTISED(return size_of<F>(rows, columns);)
    FOR_FLOATS(return size_of<F>(rows, columns);)
  }
  return -1;
}

template <typename F>
static void pack_values(const int8_t* values, const void* by, const void* least, long rows, long columns, char* to,
                        long threads) {
  using Scale = std::remove_reference_t<decltype(F::Tile::by[0])>;
  auto* tile = (typename F::Tile*)to;
  long tiles = columns / F::INPUTS;
  in_parallel(threads, (rows + LANES - 1) / LANES, [&](long group) {
    for (long r = group * LANES; r < rows && r < (group + 1) * LANES; r++)
      for (long b = 0; b < tiles; b++) {
        auto& t = tile[group * tiles + b];
        t.by[r % LANES] = ((const Scale*)by)[r * tiles + b];
        if constexpr (sizeof(t.least) > 0) t.least[r % LANES] = ((const Scale*)least)[r * tiles + b];
        const int8_t* own = values + r * columns + b * F::INPUTS;
        for (long c = 0; c < F::WORDS; c++) t.word[c][r % LANES] = F::joined(own + c * F::EACH_WORD);
      }
  });
}

template <typename F>
static void pack_numbers(const void* from, long rows, long columns, char* to, long threads) {
  using Number = std::remove_reference_t<decltype(F::Tile::number[0][0])>;
  auto* tile = (typename F::Tile*)to;
  long tiles = (columns + F::INPUTS - 1) / F::INPUTS;
  in_parallel(threads, rows, [&](long r) {
    for (long k = 0; k < columns; k++)
      tile[r / LANES * tiles + k / F::INPUTS].number[k % F::INPUTS][r % LANES] = ((const Number*)from)[r * columns + k];
  });
}

// values (rows, columns), a byte each; scales and minimums (rows, groups). `to` holds zeros.
extern "C" void pack_quantised(long format, const int8_t* values, const void* by, const void* least, long rows,
                               long columns, char* to, long threads) {
  switch (format) { FOR_QUANTISED(pack_values<F>(values, by, least, rows, columns, to, threads);) }
}

extern "C" void pack_floats(long format, const void* from, long rows, long columns, char* to, long threads) {
  switch (format) { FOR_FLOATS(pack_numbers<F>(from, rows, columns, to, threads);) }
}

// y (n, rows) = x (n, columns) · matrix^T, for parts of a model that stand alone. `bits` of activations as in model.h.
extern "C" void multiply(const Matrix* m, const float* x, long n, float* y, long bits, long threads) {
  Rows input(n, m->columns, bits, !is_quantised(*m));
  for (long t = 0; t < n; t++) input.fill(t, x + t * m->columns, m->columns);
  Team team(1, threads);
  team.start([&](Team::Member member) {
    std::vector<float> part(input.together * n * LANES);
    member.share(output_units(*m, input), [&](long g) { outputs(*m, g, input, nullptr, y, part.data()); });
  });
}

// Rows `ids` (count,) of a matrix -> y (count, columns) in fp32.
extern "C" long take_rows(const Matrix* m, const int64_t* ids, long count, float* y) {
  if (!has_rows(*m, ids, count)) return OUTSIDE_VOCABULARY;
  for (long i = 0; i < count; i++) matrix_row(*m, ids[i], y + i * m->columns);
  return DONE;
}
