// Sixteen integer sums side by side, on three kinds of processors.
//
//   Weights  32 codes widened to 16 bits: for each of 16 columns its codes at k and k+1
//   Sums     16 sums of 32 bits, one a column
//   add(sums, weights, x)   sums[c] += w[c][k] * x[k] + w[c][k+1] * x[k+1]
//
// | flag of the compiler | processor           | one `add`                                     |
// |----------------------|---------------------|-----------------------------------------------|
// | __AVX512VNNI__       | Ice Lake, Zen 4     | one vpdpwssd (the kind that does not saturate)|
// | __AVX2__             | Haswell, Zen        | two vpmaddwd and two vpaddd                   |
// | neither              | any other           | a loop that compilers vectorise (NEON)        |
//
// Why 16-bit products and not the 8-bit ones made for this: without VNNI an 8-bit product sums
// pairs in 16 bits and SATURATES, so that large codes give wrong integers, and 9 to 16-bit
// activations do not fit at all. A pair of 16-bit products is at most 2 * 127 * 32767 < 2^31.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace skipless {

constexpr int kColumns = 16;

// The codes x[k], x[k+1] of a row as one 32-bit word.
inline int32_t pair_at(const int16_t* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof word);
  return word;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr int kRows = 12;
constexpr const char* kLevel = "vnni";
using Weights = __m512i;
using Sums = __m512i;
using Pair = __m512i;

inline Sums zero() { return _mm512_setzero_si512(); }
inline Pair spread(const int16_t* x) { return _mm512_set1_epi32(pair_at(x)); }
inline Weights load_bytes(const int8_t* w) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
}
// Low nibbles are columns 0-7, high ones 8-15; shifts of 12 and 8 bits bring the sign along.
constexpr int64_t kLow = 0x000c000c000c000c, kHigh = 0x0008000800080008;
inline Weights load_nibbles(const int8_t* w) {
  __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  const __m512i twice = _mm512_broadcast_i64x4(bytes);
  const __m512i shifts = _mm512_set_epi64(kHigh, kHigh, kHigh, kHigh, kLow, kLow, kLow, kLow);
  return _mm512_srai_epi16(_mm512_sllv_epi16(twice, shifts), 12);
}
inline Sums add(Sums sums, Weights w, Pair x) { return _mm512_dpwssd_epi32(sums, w, x); }
inline Sums join(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline void store(Sums sums, int32_t* to) { _mm512_store_si512(to, sums); }

#elif defined(__AVX2__)

constexpr int kRows = 6;  // 12 sums, 2 weights and 1 pair fill 15 of 16 registers
constexpr const char* kLevel = "avx2";
struct Twice {
  __m256i low, high;  // columns 0-7, 8-15
};
using Weights = Twice;
using Sums = Twice;
using Pair = __m256i;

inline Sums zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Pair spread(const int16_t* x) { return _mm256_set1_epi32(pair_at(x)); }
inline Weights load_bytes(const int8_t* w) {
  const __m128i* from = reinterpret_cast<const __m128i*>(w);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
}
inline Weights load_nibbles(const int8_t* w) {
  __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 12), 12),
          _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 12)};
}
inline Sums add(Sums sums, Weights w, Pair x) {
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(w.low, x)),
          _mm256_add_epi32(sums.high, _mm256_madd_epi16(w.high, x))};
}
inline Sums join(Sums a, Sums b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline void store(Sums sums, int32_t* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), sums.low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(to) + 1, sums.high);
}

#else

constexpr int kRows = 4;
constexpr const char* kLevel = "plain";
struct Weights {
  int16_t even[kColumns], odd[kColumns];
};
struct Sums {
  int32_t of[kColumns];
};
struct Pair {
  int32_t even, odd;
};

inline Sums zero() { return Sums{}; }
inline Pair spread(const int16_t* x) { return {x[0], x[1]}; }
inline Weights load_bytes(const int8_t* w) {
  Weights out;
  for (int c = 0; c < kColumns; ++c) out.even[c] = w[2 * c], out.odd[c] = w[2 * c + 1];
  return out;
}
inline Weights load_nibbles(const int8_t* w) {
  Weights out;
  for (int c = 0; c < kColumns / 2; ++c) {
    const int even = static_cast<uint8_t>(w[2 * c]), odd = static_cast<uint8_t>(w[2 * c + 1]);
    out.even[c] = static_cast<int16_t>(((even & 15) ^ 8) - 8);
    out.odd[c] = static_cast<int16_t>(((odd & 15) ^ 8) - 8);
    out.even[c + 8] = static_cast<int16_t>(((even >> 4) ^ 8) - 8);
    out.odd[c + 8] = static_cast<int16_t>(((odd >> 4) ^ 8) - 8);
  }
  return out;
}
inline Sums add(Sums sums, const Weights& w, Pair x) {
  for (int c = 0; c < kColumns; ++c) sums.of[c] += w.even[c] * x.even + w.odd[c] * x.odd;
  return sums;
}
inline Sums join(Sums a, const Sums& b) {
  for (int c = 0; c < kColumns; ++c) a.of[c] += b.of[c];
  return a;
}
inline void store(const Sums& sums, int32_t* to) { std::memcpy(to, sums.of, sizeof sums.of); }

#endif

}  // namespace skipless
