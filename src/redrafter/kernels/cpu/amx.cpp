// Activations in 16 bits on AMX, which multiplies tiles of up to 16 rows of 64 bytes: 16 tokens, 16 outputs, one group of
// inputs. The sums are the integers that other CPUs add, and they are scaled by the same operations.
#include "rounded.h"

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

// Linux lets a process use tiles if it asks once. Where it does not, library.py takes another library.
constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
[[maybe_unused]] static const long asked = syscall(SYS_arch_prctl, REQUEST, TILE_DATA);

namespace {

constexpr long ROWS = 16;  // of a tile
constexpr long HALF = 8;   // tokens whose sums are scaled together
constexpr int HIGH = 4, LOW = 5, WEIGHTS = 6;  // tiles of digits and of weights; sums are in 0 and 1, or in 2 and 3

struct alignas(64) Shapes {  // of the tiles 0 to 7, as the CPU reads them
  uint8_t palette = 1, start = 0, zeros[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, long count, long width) { rows[tile] = count, bytes[tile] = width; }
};

template <int T>
INLINE void tile_load(const void* from, long step) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(T) : "memory");
}
template <int T>
INLINE void tile_store(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(64L), "i"(T) : "memory");
}
template <int T>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int SUM, int X, int W>
INLINE void add_floats() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}
template <int SUM, int X, int W>
INLINE void add_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}

struct alignas(64) Sums {  // of two tiles: floats or integers
  float lane[2][ROWS][LANES];
};

// What tiles of a format's weights hold, and how they are multiplied with a group of inputs of some tokens. Sums are in the
// tiles SUM and SUM + 1. `between(i)` is done after each fourth of the work.
template <typename F>
struct Tiles;

// 4 bits: weights, and both digits of an activation, as bf16. Their sum in fp32 is an integer below 2^24 at every step:
// 32 · 15 · 32639. Two groups of outputs at once, so that each digit is read once for 32 of them.
template <typename Scale, bool MINIMUM, int ZERO>
struct Tiles<Four<Scale, MINIMUM, ZERO>> {
  using F = Four<Scale, MINIMUM, ZERO>;
  static constexpr long GROUPS = 2, WEIGHT_ROWS = 16, BYTES = 64;  // bytes of a token's digit
  struct Weights {
    alignas(64) uint16_t number[ROWS][2 * LANES];
  };
  INLINE const void* unpacked(const typename F::Tile& tile, Weights& to) {
    constexpr int SHIFTS[] = {0, 8, 4, 12};
    alignas(64) uint16_t value[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++) {
      const float f = i % LANES - ZERO;
      uint32_t bits;
      memcpy(&bits, &f, sizeof bits);
      value[i] = bits >> 16;
    }
    const __m512i table = _mm512_load_si512(value);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      const __m512i word = _mm512_loadu_si512(tile.word[c]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        _mm512_store_si512(to.number[4 * c + i], _mm512_permutexvar_epi16(_mm512_srli_epi16(word, SHIFTS[i]), table));
    }
    return to.number;
  }
  template <int SUM, typename Between>
  INLINE void multiply(const Digits& x, const DigitBytes&, long, const void* const* weights, bool fresh, Between between) {
    if (fresh) tile_load<WEIGHTS>(weights[0], 64), tile_load<WEIGHTS + 1>(weights[1], 64);
    tile_load<HIGH>(x.high, sizeof x);
    tile_zero<SUM>();
    add_floats<SUM, HIGH, WEIGHTS>();
    between(0);
    tile_zero<SUM + 1>();
    add_floats<SUM + 1, HIGH, WEIGHTS + 1>();
    between(1);
    tile_load<LOW>(x.low, sizeof x);
    add_floats<SUM, LOW, WEIGHTS>();
    between(2);
    add_floats<SUM + 1, LOW, WEIGHTS + 1>();
    between(3);
  }
  INLINE vec sum(const Sums& sums, long group, long t) { return load(sums.lane[group][t]); }
};

// 8 bits: the weights as they lie in memory. The sums of both digits are integers of 32 bits.
template <typename Scale, bool MINIMUM, long GROUP>
struct Tiles<Eight<Scale, MINIMUM, GROUP>> {
  using F = Eight<Scale, MINIMUM, GROUP>;
  static constexpr long GROUPS = 1, WEIGHT_ROWS = GROUP / 4, BYTES = GROUP;
  struct Weights {};
  INLINE const void* unpacked(const typename F::Tile& tile, Weights&) { return tile.word; }
  template <int SUM, typename Between>
  INLINE void multiply(const Digits&, const DigitBytes& x, long half, const void* const* weights, bool fresh, Between between) {
    if (fresh) tile_load<WEIGHTS>(weights[0], 64);
    tile_load<HIGH>(x.high + half * LANES, sizeof x);
    tile_zero<SUM>();
    add_bytes<SUM, HIGH, WEIGHTS>();
    between(0), between(1);
    tile_load<LOW>(x.low + half * LANES, sizeof x);
    tile_zero<SUM + 1>();
    add_bytes<SUM + 1, LOW, WEIGHTS>();
    between(2), between(3);
  }
  INLINE vec sum(const Sums& sums, long, long t) {
    ivec y;
    EACH y.part[i] = (((const integers*)sums.lane[0][t])[i] << 8) + ((const integers*)sums.lane[1][t])[i];
    return to_floats(y);
  }
};

// Adds the sums of a group of inputs to the outputs of some tokens; `first`: it is the first group.
template <typename F, int TOKENS, long GROUPS>
void scale(const typename F::Tile* const* tile, const Sums& sums, long row, bool first, const Scaled* by_token,
           float* const* y) {
  vec sum[GROUPS][TOKENS];
  By by[GROUPS];
#pragma GCC unroll 2
  for (long g = 0; g < GROUPS; g++) {
    by[g] = F::by(*tile[g]);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) sum[g][t] = first ? zero() : load(y[g] + t * LANES);
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++) {
    const vec scale = all(by_token[t].scale), total = all(by_token[t].total);
#pragma GCC unroll 2
    for (long g = 0; g < GROUPS; g++) {
      sum[g][t] = fma(Tiles<F>::sum(sums, g, row + t) * scale, by[g].scale, sum[g][t]);
      if (F::HAS_MINIMUM) sum[g][t] = fma(by[g].least, total, sum[g][t]);
    }
  }
#pragma GCC unroll 2
  for (long g = 0; g < GROUPS; g++)
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) store(y[g] + t * LANES, sum[g][t]);
}

// Groups of outputs of some tokens, in steps: a group of inputs, and a block of `rows` tokens. The last block may begin with
// tokens of the one before it, which are not scaled twice. Steps overlap, because a tile takes long from its load to its
// sums: while one is multiplied, the sums of the one before are stored, those of the one before that are scaled, and the
// weights of the next are unpacked.
template <typename F>
struct Product {
  using T = Tiles<F>;
  static constexpr long AHEAD = 2048 / sizeof(typename F::Tile);  // tiles that memory is asked for in advance
  const typename F::Tile* tile[T::GROUPS];
  float* y[T::GROUPS];  // (tokens, 16) each
  const long tiles;
  const Digits* digits;  // (groups of inputs, among), and so the others
  const DigitBytes* bytes;
  const Scaled* scaled;
  const long among, tokens;
  const long parts = (tokens + ROWS - 1) / ROWS, rows = (tokens + parts - 1) / parts;
  typename T::Weights room[2][T::GROUPS];
  const void* weights[2][T::GROUPS];
  Sums sums[2];

  struct Step {
    long at = 0, part = 0;
  };
  INLINE_MEMBER long first(Step s) const { return std::min(s.part * rows, tokens - rows); }
  INLINE_MEMBER Step after(Step s) const { return s.part + 1 < parts ? Step{s.at, s.part + 1} : Step{s.at + 1, 0}; }
  INLINE_MEMBER void unpack(long at, long group) {
    if (group >= T::GROUPS || at >= tiles) return;
    const auto& from = tile[group][at];
    // Behind the end of a group come the weights of the group that is multiplied next in its place.
    const auto* later = &from + AHEAD + (at + AHEAD < tiles ? 0 : (T::GROUPS - 1) * tiles);
    for (size_t i = 0; i < sizeof from; i += 64) __builtin_prefetch((const char*)later + i);
    weights[at % 2][group] = T::unpacked(from, room[at % 2][group]);
  }
  // Scales the sums of half a block.
  INLINE_MEMBER void finish(Step s, const Sums& from, long half) {
    const long row = std::max(half * HALF, s.part * rows - first(s)), end = std::min(rows, (half + 1) * HALF);
    const Scaled* by = scaled + s.at * F::INPUTS / TILE * among + first(s) + row;
    const typename F::Tile* own[T::GROUPS];
    float* to[T::GROUPS];
    for (long g = 0; g < T::GROUPS; g++) own[g] = tile[g] + s.at, to[g] = y[g] + (first(s) + row) * LANES;
    switch (end - row) {
#define CASE(N) case N: scale<F, N, T::GROUPS>(own, from, row, s.at == 0, by, to); break;
      FOR_EACH_COUNT(CASE)
#undef CASE
    }
  }
  template <int ODD>
  INLINE_MEMBER void step(long turn, Step now, Step old) {
    constexpr int SUM = 2 * ODD, OTHER = 2 - SUM;
    const long input = now.at * F::INPUTS, x = input / TILE * among + first(now);
    auto between = [&](int i) __attribute__((always_inline)) {
      if (i % 2 == 0 && turn > 1) finish(old, sums[ODD], i / 2);
      if (i == 1 && turn) tile_store<OTHER>(sums[1 - ODD].lane[0]);
      if (i == 3 && turn) tile_store<OTHER + 1>(sums[1 - ODD].lane[1]);
      if (i % 2 && now.part == 0) unpack(now.at + 1, i / 2);
    };
    T::template multiply<SUM>(digits[x], bytes[x], input % TILE / LANES, weights[now.at % 2], now.part == 0, between);
  }
  void run() {
    Shapes shapes;
    for (int i = 0; i < HIGH; i++) shapes.set(i, rows, 64);
    for (int i = HIGH; i < WEIGHTS; i++) shapes.set(i, rows, T::BYTES);
    for (int i = WEIGHTS; i < 8; i++) shapes.set(i, T::WEIGHT_ROWS, 64);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    for (long g = 0; g < T::GROUPS; g++) unpack(0, g);
    Step now, old, oldest;
    long turn = 0;
    for (; now.at < tiles; turn++, oldest = old, old = now, now = after(now)) {
      if (turn % 2) step<1>(turn, now, oldest);
      else step<0>(turn, now, oldest);
    }
    if (turn > 1) finish(oldest, sums[turn % 2], 0), finish(oldest, sums[turn % 2], 1);
    Sums& last = sums[(turn + 1) % 2];
    if (turn % 2) tile_store<0>(last.lane[0]), tile_store<1>(last.lane[1]);
    else tile_store<2>(last.lane[0]), tile_store<3>(last.lane[1]);
    finish(old, last, 0), finish(old, last, 1);
    asm volatile("tilerelease");
  }
};

template <typename F>
void every(const Matrix& m, long group, long groups, const Rows& input, Span tokens, float* y) {
  constexpr long GROUPS = Tiles<F>::GROUPS;
  const auto* tile = (const typename F::Tile*)m.data + group * m.tiles;
  const long step = (tokens.to - tokens.from) * LANES;
  for (long g = 0; g < groups; g += GROUPS)
    for (long from = tokens.from, to; from < tokens.to; from = to) {
      to = std::min(tokens.to, (from / input.width + 1) * input.width);
      const long x = input.place(from, 0);
      Product<F> product{{}, {}, m.tiles, &input.digits[x], &input.bytes[x], &input.scaled[x], input.width, to - from};
      for (long i = 0; i < GROUPS; i++) {  // one group alone is multiplied twice
        const long own = std::min(g + i, groups - 1);
        product.tile[i] = tile + own * m.tiles, product.y[i] = y + own * step + (from - tokens.from) * LANES;
      }
      product.run();
    }
}

}  // namespace

void product_amx(const Matrix& m, long group, long groups, const Rows& input, Span tokens, float* y) {
  switch (m.format) { FOR_QUANTISED(every<F>(m, group, groups, input, tokens, y);) }
}
#endif
