// How weights lie in memory. A matrix is cut into groups of 16 output rows, one row per lane, and a group into tiles of a
// few inputs. A tile holds everything that its weights need, so a product reads one stream of memory.
//
// Each format says how a tile becomes vectors of 16 weights without scale (`weight`), and how the sum of a tile's products
// is scaled and added to the result (`add`): scale · sum(value · x) + (minimum - zero · scale) · sum(x). The sum of x comes
// in halves, of 16 inputs each.
#pragma once
#include "vector.h"

struct Matrix {  // the same fields in the same order as in library.py
  const char* data;
  long rows, columns;  // of the model: the last group and the last tile may be filled up with zeros
  long tiles;          // in a group
  long format;         // an index into FORMATS of library.py
};

struct By {
  vec scale, least;
};

INLINE vec scales(const uint16_t* x) { return halves(x); }
INLINE vec scales(const float* x) { return load(x); }
INLINE float scale(uint16_t x) { return half_to_float(x); }
INLINE float scale(float x) { return x; }

constexpr int ZERO_AT = 8;  // in formats of 4 bits whose values stand for -8 to 7

// 4 bits: the 32-bit word `c` of a row holds its inputs 8c to 8c + 7. Byte i has input 8c + i in its lower half and
// 8c + 4 + i in its upper half, so that four neighbouring inputs are four bytes.
template <typename Scale, bool MINIMUM, int ZERO>  // ZERO: 0 or ZERO_AT
struct Four {
  static constexpr long INPUTS = 32;
  struct Tile {
    Scale by[LANES], least[MINIMUM ? LANES : 0];
    uint32_t word[4][LANES];
  };
  static constexpr long WORDS = 4, EACH_WORD = 8;
  static constexpr bool HAS_MINIMUM = MINIMUM;
  INLINE ivec word(const Tile& t, long c) { return load(t.word[c]); }
  INLINE int shift(int at) { return at % 4 * 8 + at / 4 * 4; }
  INLINE vec weight(ivec w, int at) {
#if defined(__AVX512F__)  // a table takes its index from the four lowest bits
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {{(floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)w.part[0], shift(at)), table)}};
#else
    EACH w.part[i] = (integers)((naturals)w.part[i] >> shift(at)) & 15;
    return to_floats(w);
#endif
  }
  INLINE By by(const Tile& t) { return {scales(t.by), MINIMUM ? scales(t.least) : zero()}; }
  INLINE vec add(By by, vec part, const float* halves, vec sum) {
    if (ZERO) part = fma(all(-(float)ZERO), all(halves[1]), fma(all(-(float)ZERO), all(halves[0]), part));
    sum = fma(part, by.scale, sum);
    return MINIMUM ? fma(by.least, all(halves[1]), fma(by.least, all(halves[0]), sum)) : sum;
  }
  static float value(const Tile& t, long row, long input) {
    float w = scale(t.by[row]) * (float)((int)(t.word[input / 8][row] >> shift(input % 8) & 15) - ZERO);
    return MINIMUM ? w + scale(t.least[row]) : w;
  }
  static uint32_t joined(const int8_t* values) {  // a word of a row
    uint32_t low, high;
    memcpy(&low, values, sizeof low);
    memcpy(&high, values + 4, sizeof high);
    return low | high << 4;
  }
};

// 8 bits, signed: byte i of the 32-bit word `c` of a row is the row's input 4c + i.
template <typename Scale, bool MINIMUM, long GROUP>
struct Eight {
  static constexpr long INPUTS = GROUP;
  struct Tile {
    Scale by[LANES], least[MINIMUM ? LANES : 0];
    uint32_t word[GROUP / 4][LANES];
  };
  static constexpr long WORDS = GROUP / 4, EACH_WORD = 4;
  static constexpr bool HAS_MINIMUM = MINIMUM;
  INLINE ivec word(const Tile& t, long c) { return load(t.word[c]); }
  INLINE vec weight(ivec w, int at) {
    EACH w.part[i] = w.part[i] << (24 - 8 * at) >> 24;
    return to_floats(w);
  }
  INLINE By by(const Tile& t) { return {scales(t.by), MINIMUM ? scales(t.least) : zero()}; }
  INLINE vec add(By by, vec part, const float* halves, vec sum) {
    static_assert(!MINIMUM || GROUP == 32);
    sum = fma(part, by.scale, sum);
    return MINIMUM ? fma(by.least, all(halves[1]), fma(by.least, all(halves[0]), sum)) : sum;
  }
  static float value(const Tile& t, long row, long input) {
    float w = scale(t.by[row]) * (float)(int8_t)(t.word[input / 4][row] >> (input % 4 * 8));
    return MINIMUM ? w + scale(t.least[row]) : w;
  }
  static uint32_t joined(const int8_t* values) {  // a word of a row
    uint32_t word;
    memcpy(&word, values, sizeof word);
    return word;
  }
};

// Floats as they are. A "word" is two neighbouring inputs here.
template <typename Number, vec (*LOAD)(const Number*), float (*ONE)(Number)>
struct Float {
  static constexpr long INPUTS = 32;
  struct Tile {
    Number number[INPUTS][LANES];
  };
  static constexpr long WORDS = 16, EACH_WORD = 2;
  INLINE const Number* word(const Tile& t, long c) { return t.number[2 * c]; }
  INLINE vec weight(const Number* w, int at) { return LOAD(w + at * LANES); }
  INLINE By by(const Tile&) { return {zero(), zero()}; }
  INLINE vec add(By, vec part, const float*, vec sum) { return sum + part; }
  static float value(const Tile& t, long row, long input) { return ONE(t.number[input][row]); }
};
static inline vec load_fp32(const float* x) { return load(x); }
static inline vec load_fp16(const uint16_t* x) { return halves(x); }
static inline vec load_bf16(const uint16_t* x) { return bfloats(x); }
static inline float fp32(float x) { return x; }
static inline float fp16(uint16_t x) { return half_to_float(x); }
static inline float bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Calls DO(format) for the format of a matrix. The order is that of FORMATS in library.py.
#define FOR_QUANTISED(DO)                        \
  case 0: { using F = Four<uint16_t, true, 0>; DO } break;    \
  case 1: { using F = Four<float, true, 0>; DO } break;       \
  case 2: { using F = Four<uint16_t, false, ZERO_AT>; DO } break;   \
  case 3: { using F = Eight<uint16_t, false, 32>; DO } break; \
  case 4: { using F = Eight<uint16_t, true, 32>; DO } break;  \
  case 5: { using F = Eight<float, true, 32>; DO } break;     \
  case 6: { using F = Eight<float, false, 16>; DO } break;
INLINE bool is_quantised(const Matrix& m) { return m.format < 7; }
#define FOR_FLOATS(DO)                                             \
  case 7: { using F = Float<float, load_fp32, fp32>; DO } break;    \
  case 8: { using F = Float<uint16_t, load_fp16, fp16>; DO } break; \
  case 9: { using F = Float<uint16_t, load_bf16, bf16>; DO } break;
