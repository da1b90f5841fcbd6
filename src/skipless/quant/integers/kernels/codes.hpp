// Codes of float32 rows: absmax (or a given step), division, round to nearest even, the same three
// roundings as `quant/fake.py`. The codes are int16 or int8, rows padded with zeros.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "pool.hpp"

namespace skipless {

// Of |x|, the largest, as the bits of a float32: these are ordered like the numbers, infinity comes
// after every number and NaN after infinity, and compilers vectorise the search.
inline uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// absmax / limit, at least the smallest normal number; NaN where a value was not finite.
inline float scale_of(uint32_t bits, int limit) {
  if (bits >= kInfinity) return kNaN;
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  const float divisor = static_cast<float>(limit);
  return std::max(largest, std::numeric_limits<float>::min() * divisor) / divisor;
}

template <typename Code>
inline void round_row(const float* x, int64_t count, float step, int limit, Code* codes) {
  const float bound = static_cast<float>(limit);
  for (int64_t i = 0; i < count; ++i) {
    const float code = std::nearbyintf(x[i] / step);
    const float kept = code > bound ? bound : code < -bound ? -bound : code;
    codes[i] = static_cast<Code>(static_cast<int32_t>(kept));
  }
}

struct Rows {
  const float* x;
  int64_t rows, count, stride;
};

// Codes of `from` in rows of `padded`, and the scales: one, or one a row. `step` > 0 is a given
// scale, which may clip; a row with NaN then gets the scale NaN (as many scales as rows). Otherwise
// absmax / limit, NaN where a value is not finite; codes are then 0.
template <typename Code>
void make_codes(const Rows& from, int64_t padded, int limit, bool per_row, float step, Code* codes,
                float* scales, int threads) {
  // Below some thousand values a second thread costs more than it saves.
  const int64_t share = std::max<int64_t>(1, 16384 / std::max<int64_t>(from.count, 1));
  const int64_t pieces = (from.rows + share - 1) / share;
  float shared = step;
  if (step <= 0 && !per_row) {
    std::atomic<uint32_t> largest{0};
    Pool::run(pieces, threads, [&](int64_t piece) {
      uint32_t mine = 0;
      const int64_t last = std::min(from.rows, (piece + 1) * share);
      for (int64_t r = piece * share; r < last; ++r) {
        mine = std::max(mine, largest_bits(from.x + r * from.stride, from.count));
      }
      uint32_t known = largest.load();
      while (known < mine && !largest.compare_exchange_weak(known, mine)) {
      }
    });
    shared = scales[0] = scale_of(largest.load(), limit);
  }
  Pool::run(pieces, threads, [&](int64_t piece) {
    const int64_t last = std::min(from.rows, (piece + 1) * share);
    for (int64_t r = piece * share; r < last; ++r) {
      const float* x = from.x + r * from.stride;
      Code* to = codes + r * padded;
      float scale = shared;
      if (step > 0) {
        scale = scales[r] = largest_bits(x, from.count) > kInfinity ? kNaN : step;
      } else if (per_row) {
        scale = scales[r] = scale_of(largest_bits(x, from.count), limit);
      }
      if (std::isnan(scale)) {
        std::fill(to, to + padded, static_cast<Code>(0));
      } else {
        round_row(x, from.count, scale, limit, to);
        std::fill(to + from.count, to + padded, static_cast<Code>(0));
      }
    }
  });
}

}  // namespace skipless
