// One new token through a sublayer in one call: norm, codes, products, attention or activation,
// codes, product. For decoding, where a call per operation costs more than the operation.
//
// What is exact in gemm.cpp is exact here, by the same functions: codes of an input, integer sums,
// scaling. The rest is float32 as in torch, up to the order of sums and the last digits of exp and
// erf. Keys and values lie in the caller's cache as float32, int8 or pairs of 4 bits, with scales
// for a token, or a token and head; new ones are rounded, stored, and used as stored.
//
// Legend: B rows (sequences), D width, H heads, G key/value heads, K head size, S tokens.
#pragma once

#include <cmath>
#include <vector>

#include "codes.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace skipless {

// integers/structures.py repeats the layouts of the structs that steps are told.
struct Linear {
  const int8_t* w;
  const float* column_scale;
  const float* bias;
  int64_t inputs, groups, columns, block;
  int32_t form, limit;
  int32_t per_row;
  float step;  // > 0: a fixed range
};

struct Norm {
  const float* weight;
  const float* bias;
  float epsilon;
  int32_t kind;  // 0 none, 1 RMSNorm, 2 LayerNorm
};

struct Rounding {
  int32_t kind;  // of storage: 0 float32, 1 int8, 2 pairs of 4 bits
  int32_t limit, per_head;
  float step;
};

struct Store {
  void* codes;    // [B, G, capacity, K], or half as many bytes for pairs
  float* scales;  // [capacity] or [B, G, capacity]; null for float32
  int64_t capacity;
};

struct AttentionLayer {
  Norm norm;
  Linear q, k, v, o;
  Rounding key, value;
  int64_t heads, groups, size;
  const float* head_scale;     // [H], what multiplies the logits
  const float* identity_bias;  // [H], added where a token sees itself; may be null
};

struct MlpLayer {
  Norm norm;
  Linear gate, up, down;  // gate.w is null without one
  int64_t activation;     // 0 gelu, 1 relu, 2 relu squared, 3 silu of the gate
};

// y = a x + b f + c x0 (C0), then a norm or none.
struct Join {
  const float *a, *b, *c;  // [D]; null stands for 0, but for `a_is_one` and a b of 1
  int64_t a_is_one;
  Norm after;
};

// One of a stack: attention (0), an MLP (1), or only the norm of its join (2).
struct Sublayer {
  int64_t kind;
  const AttentionLayer* attention;
  const MlpLayer* mlp;
  Join join;
  Store keys, values;
};

// exp to 2 units in the last place, without branches so that loops vectorise; source: the usual
// reduction to [-ln2/2, ln2/2] and a polynomial of degree 6 (Cephes).
inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float whole = std::nearbyintf(x * 1.44269504088896341f);
  const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// erf to 1.5e-7; source: Abramowitz and Stegun, 7.1.26.
inline float fast_erf(float x) {
  const float a = std::fabs(x), t = 1.0f / (1.0f + 0.3275911f * a);
  const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
                   0.254829592f) * t;
  return std::copysign(1.0f - p * fast_exp(-a * a), x);
}

// Vectors of the compiler, as long as the processor's.
#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX2__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kWide)));

inline Floats floats_at(const float* x) {
  Floats found;
  std::memcpy(&found, x, sizeof found);
  return found;
}
inline Floats floats_at(const int8_t* x) {
// By hand, since what compilers make of __builtin_convertvector is slower.
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  return Floats{float(x[0]), float(x[1]), float(x[2]), float(x[3])};
#endif
}

inline float sum_of(Floats lanes) {
  float parts[kWide];
  std::memcpy(parts, &lanes, sizeof lanes);
  for (int half = kWide / 2; half; half /= 2) {
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

inline float sum_of_squares(const float* x, int64_t count, float center) {
  Floats lanes = {};
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const Floats value = floats_at(x + i) - center;
    lanes += value * value;
  }
  float sum = sum_of(lanes);
  for (; i < count; ++i) sum += (x[i] - center) * (x[i] - center);
  return sum;
}

template <typename Code>
inline float dot(const float* x, const Code* y, int64_t count) {
  Floats even = {}, odd = {}, third = {}, fourth = {};
  int64_t i = 0;
  for (; i + 4 * kWide <= count; i += 4 * kWide) {
    even += floats_at(x + i) * floats_at(y + i);
    odd += floats_at(x + i + kWide) * floats_at(y + i + kWide);
    third += floats_at(x + i + 2 * kWide) * floats_at(y + i + 2 * kWide);
    fourth += floats_at(x + i + 3 * kWide) * floats_at(y + i + 3 * kWide);
  }
  for (; i + kWide <= count; i += kWide) even += floats_at(x + i) * floats_at(y + i);
  float sum = sum_of((even + odd) + (third + fourth));
  for (; i < count; ++i) sum += x[i] * static_cast<float>(y[i]);
  return sum;
}

// out += weight * y
template <typename Code>
inline void add_scaled(float weight, const Code* y, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const Floats sum = floats_at(out + i) + weight * floats_at(y + i);
    std::memcpy(out + i, &sum, sizeof sum);
  }
  for (; i < count; ++i) out[i] += weight * static_cast<float>(y[i]);
}

// out = sum over s of weights[s] * rows[s], rows of `count`; four vectors at a time stay in
// registers through all rows.
template <typename Code>
inline void weighted_sum(const float* weights, const Code* rows, int64_t num_rows, int64_t count,
                         float* out) {
  int64_t i = 0;
  for (; i + 4 * kWide <= count; i += 4 * kWide) {
    Floats a = {}, b = {}, c = {}, d = {};
    for (int64_t s = 0; s < num_rows; ++s) {
      const Code* row = rows + s * count + i;
      a += weights[s] * floats_at(row);
      b += weights[s] * floats_at(row + kWide);
      c += weights[s] * floats_at(row + 2 * kWide);
      d += weights[s] * floats_at(row + 3 * kWide);
    }
    const Floats found[4] = {a, b, c, d};
    std::memcpy(out + i, found, sizeof found);
  }
  if (i == count) return;
  std::fill(out + i, out + count, 0.0f);
  for (int64_t s = 0; s < num_rows; ++s) {
    add_scaled(weights[s], rows + s * count + i, count - i, out + i);
  }
}

inline void normalize(const Norm& norm, const float* x, int64_t rows, int64_t width, float* y) {
  for (int64_t r = 0; r < rows; ++r, x += width, y += width) {
    float center = 0;
    if (norm.kind == 2) {
      double total = 0;
      for (int64_t i = 0; i < width; ++i) total += x[i];
      center = static_cast<float>(total / width);
    }
    const float mean = sum_of_squares(x, width, center) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + norm.epsilon);
    for (int64_t i = 0; i < width; ++i) y[i] = (x[i] - center) * scale * norm.weight[i];
    if (norm.bias) {
      for (int64_t i = 0; i < width; ++i) y[i] += norm.bias[i];
    }
  }
}

// The cache of one head of one sequence.
struct Head {
  const Rounding& kind;
  const Store& store;
  int64_t index, size;  // b * G + g
  float* unpacked;      // room for one token

  int64_t bytes() const { return kind.kind == 2 ? (size + 1) / 2 : size; }
  int8_t* codes(int64_t token) const {
    return static_cast<int8_t*>(store.codes) + (index * store.capacity + token) * bytes();
  }
  float* floats(int64_t token) const {
    return static_cast<float*>(store.codes) + (index * store.capacity + token) * size;
  }
  float& scale(int64_t token) const {
    return store.scales[kind.per_head ? index * store.capacity + token : token];
  }
  const int8_t* whole(int64_t token) const {
    if (kind.kind == 1) return codes(token);
    int8_t* to = reinterpret_cast<int8_t*>(unpacked);
    const uint8_t* from = reinterpret_cast<const uint8_t*>(codes(token));
    const int64_t count = bytes();
    for (int64_t i = 0; i < count; ++i) {  // compilers vectorise it in bytes
      to[2 * i] = static_cast<int8_t>(((from[i] & 15) ^ 8) - 8);
      to[2 * i + 1] = static_cast<int8_t>(((from[i] >> 4) ^ 8) - 8);
    }
    return to;
  }
};

// Round new keys or values [B, G, K] and store them at `token`; returns whether all were finite.
inline bool remember(const Rounding& kind, const Store& store, const float* x, int64_t rows,
                     int64_t groups, int64_t size, int64_t token) {
  bool finite = true;
  float unused;
  float shared = kind.step;
  if (kind.kind != 0 && kind.step <= 0 && !kind.per_head) {
    shared = scale_of(largest_bits(x, rows * groups * size), kind.limit);
  }
  std::vector<int8_t> codes(size + 1, 0);
  for (int64_t index = 0; index < rows * groups; ++index, x += size) {
    const Head head{kind, store, index, size, &unused};
    if (kind.kind == 0) {
      std::copy(x, x + size, head.floats(token));
      continue;
    }
    float step = shared;
    if (kind.step <= 0 && kind.per_head) step = scale_of(largest_bits(x, size), kind.limit);
    const bool known = kind.step > 0 ? largest_bits(x, size) <= kInfinity : !std::isnan(step);
    finite = finite && known;
    head.scale(token) = known ? step : kNaN;
    if (known) round_row(x, size, step, kind.limit, codes.data());
    int8_t* to = head.codes(token);
    if (kind.kind == 1) {
      std::copy(codes.begin(), codes.begin() + size, to);
    } else {
      for (int64_t i = 0; i < head.bytes(); ++i) {
        to[i] = static_cast<int8_t>((codes[2 * i] & 15) | (codes[2 * i + 1] << 4));
      }
    }
  }
  return finite;
}

// out [K] = softmax(scale * q . keys + bias at the last) . values, over `count` tokens.
inline void attend(const float* q, const Head& keys, const Head& values, int64_t count, float scale,
                   float bias, float* logits, float* out) {
  const int64_t size = keys.size;
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < count; ++s) {
    const float product = keys.kind.kind == 0 ? dot(q, keys.floats(s), size)
                                              : dot(q, keys.whole(s), size) * keys.scale(s);
    logits[s] = product * scale + (s + 1 == count ? bias : 0.0f);
    largest = std::max(largest, logits[s]);
  }
  double total = 0;
  for (int64_t s = 0; s < count; ++s) logits[s] = fast_exp(logits[s] - largest);
  for (int64_t s = 0; s < count; ++s) total += logits[s];
  for (int64_t s = 0; s < count; ++s) logits[s] = static_cast<float>(logits[s] / total);
  if (values.kind.kind == 0) {
    weighted_sum(logits, values.floats(0), count, size, out);
    return;
  }
  for (int64_t s = 0; s < count; ++s) logits[s] *= values.scale(s);
  if (values.kind.kind == 1) {
    weighted_sum(logits, values.codes(0), count, size, out);
    return;
  }
  std::fill(out, out + size, 0.0f);
  for (int64_t s = 0; s < count; ++s) add_scaled(logits[s], values.whole(s), size, out);
}

// x [B, heads, K] turned by tables [heads * K] of cosines and signed sines (model/rope.py).
inline void rotate(float* x, int64_t rows, int64_t heads, int64_t size, const float* cosine,
                   const float* sine, float* turned) {
  const int64_t width = heads * size, half = size / 2;
  for (int64_t r = 0; r < rows; ++r, x += width) {
    for (int64_t h = 0; h < width; h += size) {
      for (int64_t i = 0; i < half; ++i) {
        turned[h + i] = x[h + i + half];
        turned[h + i + half] = x[h + i];
      }
    }
    for (int64_t i = 0; i < width; ++i) x[i] = x[i] * cosine[i] + turned[i] * sine[i];
  }
}

inline void activate(int64_t kind, const float* gate, float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (kind == 0) x[i] = 0.5f * x[i] * (1.0f + fast_erf(x[i] * 0.70710678118654752f));
    if (kind == 1) x[i] = std::max(x[i], 0.0f);
    if (kind == 2) x[i] = std::max(x[i], 0.0f) * std::max(x[i], 0.0f);
    if (kind == 3) x[i] *= gate[i] / (1.0f + fast_exp(-gate[i]));
  }
}

// x [D] := a x + b f + c x0, rounded after each operation.
inline void join(const Join& how, float* x, const float* f, const float* x0, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    float y = how.b ? f[i] * how.b[i] : f[i];
    if (how.a_is_one) y += x[i];
    if (how.a) y += x[i] * how.a[i];
    if (how.c) y += x0[i] * how.c[i];
    x[i] = y;
  }
}

}  // namespace skipless
