// Sixteen integer sums side by side, on three kinds of processors and in two forms.
//
//   Weights   the codes of 16 columns for `kGroup` inputs, ready to be multiplied
//   Spread    the codes of one row for the same inputs, the same in every lane
//   Sums      16 sums of 32 bits, one a column
//   add(sums, weights, x)   sums[c] += sum over the group of w[c][k] * x[k]
//   join(a, b)   a + b
//
// Pairs: 16-bit products of two inputs, for activations of any width.
//
// | flag of the compiler | processor           | one `add`                                     |
// |----------------------|---------------------|-----------------------------------------------|
// | __AVX512VNNI__       | Ice Lake, Zen 4     | one vpdpwssd (the kind that does not saturate)|
// | __AVX2__             | Haswell, Zen        | two vpmaddwd and two vpaddd                   |
// | neither              | any other           | a loop that compilers vectorise (NEON)        |
//
// Quads: 8-bit products of four inputs, one vpdpbusd, with AVX512-VNNI and activations of at most
// 8 bits only. One operand is unsigned, so the weights are stored with an offset of 128 (nibbles:
// 8), and offset * sum of the row's codes is taken off in the end. Sums may wrap on the way; the
// last number fits, and integer addition modulo 2^32 has no order.
//
// Why pairs elsewhere: without VNNI an 8-bit product sums pairs in 16 bits and SATURATES, so that
// large codes give wrong integers, and 9 to 16-bit activations do not fit at all. A pair of 16-bit
// products is at most 2 * 127 * 32767 < 2^31.
//
// kRows x kPanels is the tile that fits in the registers: sums, one set of weights, one spread.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace skipless {

constexpr int kColumns = 16;

template <typename Word, typename Code>
inline Word word_at(const Code* x) {
  Word word;
  std::memcpy(&word, x, sizeof word);
  return word;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr const char* kLevel = "vnni";
#define SKIPLESS_QUADS 1

struct Wide {
  using Sums = __m512i;
  static Sums zero() { return _mm512_setzero_si512(); }
  static Sums join(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static void store(Sums sums, int32_t* to) { _mm512_store_si512(to, sums); }
};

template <bool nibbles>
struct Pairs : Wide {
  using Code = int16_t;
  using Weights = __m512i;
  using Spread = __m512i;
  static constexpr int kGroup = 2, kBytes = nibbles ? 16 : 32, kRows = 8, kPanels = 2;
  static Spread spread(const Code* x) { return _mm512_set1_epi32(word_at<int32_t>(x)); }
  static Weights load(const int8_t* w) {
    if constexpr (!nibbles) {
      return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
    }
    // Low nibbles are columns 0-7, high ones 8-15; shifts of 12 and 8 bits bring the sign along.
    constexpr int64_t low = 0x000c000c000c000c, high = 0x0008000800080008;
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
    const __m512i twice = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), bytes, 1);
    const __m512i shifts = _mm512_set_epi64(high, high, high, high, low, low, low, low);
    return _mm512_srai_epi16(_mm512_sllv_epi16(twice, shifts), 12);
  }
  static Sums add(Sums sums, Weights w, Spread x) { return _mm512_dpwssd_epi32(sums, w, x); }
};

template <bool nibbles>
struct Quads;

template <>
struct Quads<false> : Wide {
  using Code = int8_t;
  using Weights = __m512i;
  using Spread = __m512i;
  static constexpr int kGroup = 4, kBytes = 64, kRows = 8, kPanels = 2, kOffset = 128;
  static Spread spread(const Code* x) { return _mm512_set1_epi32(word_at<int32_t>(x)); }
  static Weights load(const int8_t* w) { return _mm512_loadu_si512(w); }
  static Sums add(Sums sums, Weights w, Spread x) { return _mm512_dpbusd_epi32(sums, w, x); }
};

template <>
struct Quads<true> : Wide {
  using Code = int8_t;
  struct Weights {
    __m512i first, second;  // low halves of the bytes are inputs 0-3, high halves 4-7
  };
  struct Spread {
    __m512i first, second;
  };
  static constexpr int kGroup = 8, kBytes = 64, kRows = 8, kPanels = 2, kOffset = 8;
  static Spread spread(const Code* x) {
    return {_mm512_set1_epi32(word_at<int32_t>(x)), _mm512_set1_epi32(word_at<int32_t>(x + 4))};
  }
  static Weights load(const int8_t* w) {
    const __m512i bytes = _mm512_loadu_si512(w), mask = _mm512_set1_epi8(15);
    return {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
  }
  static Sums add(Sums sums, Weights w, Spread x) {
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums, w.first, x.first), w.second, x.second);
  }
};

#elif defined(__AVX2__)

constexpr const char* kLevel = "avx2";

template <bool nibbles>
struct Pairs {
  using Code = int16_t;
  struct Twice {
    __m256i low, high;  // columns 0-7, 8-15
  };
  using Weights = Twice;
  using Sums = Twice;
  using Spread = __m256i;
  // 8 sums, 2 weights, 1 spread and 1 product; 6 rows just fit, and are no faster.
  static constexpr int kGroup = 2, kBytes = nibbles ? 16 : 32, kRows = 4, kPanels = 1;

  static Sums zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Spread spread(const Code* x) { return _mm256_set1_epi32(word_at<int32_t>(x)); }
  static Weights load(const int8_t* w) {
    const __m128i* from = reinterpret_cast<const __m128i*>(w);
    if constexpr (!nibbles) {
      return {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
              _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
    }
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from));
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 12), 12),
            _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 12)};
  }
  static Sums add(Sums sums, Weights w, Spread x) {
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(w.low, x));
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(w.high, x));
    // Keeps the order: compilers put all products before all sums, which then leave the registers.
    asm volatile("" : "+x"(sums.low), "+x"(sums.high));
    return sums;
  }
  static Sums join(Sums a, Sums b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
  }
  static void store(Sums sums, int32_t* to) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), sums.low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to) + 1, sums.high);
  }
};

#else

constexpr const char* kLevel = "plain";

template <bool nibbles>
struct Pairs {
  using Code = int16_t;
  struct Weights {
    int16_t even[kColumns], odd[kColumns];
  };
  struct Sums {
    int32_t of[kColumns];
  };
  struct Spread {
    int32_t even, odd;
  };
  static constexpr int kGroup = 2, kBytes = nibbles ? 16 : 32, kRows = 4, kPanels = 1;

  static Sums zero() { return Sums{}; }
  static Spread spread(const Code* x) { return {x[0], x[1]}; }
  static Weights load(const int8_t* w) {
    Weights out;
    if constexpr (!nibbles) {
      for (int c = 0; c < kColumns; ++c) out.even[c] = w[2 * c], out.odd[c] = w[2 * c + 1];
    } else {
      for (int c = 0; c < kColumns / 2; ++c) {
        const int even = static_cast<uint8_t>(w[2 * c]), odd = static_cast<uint8_t>(w[2 * c + 1]);
        out.even[c] = static_cast<int16_t>(((even & 15) ^ 8) - 8);
        out.odd[c] = static_cast<int16_t>(((odd & 15) ^ 8) - 8);
        out.even[c + 8] = static_cast<int16_t>(((even >> 4) ^ 8) - 8);
        out.odd[c + 8] = static_cast<int16_t>(((odd >> 4) ^ 8) - 8);
      }
    }
    return out;
  }
  static Sums add(Sums sums, const Weights& w, Spread x) {
    for (int c = 0; c < kColumns; ++c) sums.of[c] += w.even[c] * x.even + w.odd[c] * x.odd;
    return sums;
  }
  static Sums join(Sums a, const Sums& b) {
    for (int c = 0; c < kColumns; ++c) a.of[c] += b.of[c];
    return a;
  }
  static void store(const Sums& sums, int32_t* to) { std::memcpy(to, sums.of, sizeof sums.of); }
};

#endif

}  // namespace skipless
