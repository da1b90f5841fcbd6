// y[m][n] = (s_a[m] * s_w[n]) * sum_k x[m][k] * w[n][k] + bias[n], the sum in exact integers (Q4).
//
// 1. Operands. x: int16 activation codes of 2 to 16 bits, rows of an even length (a zero fills an
//    odd one). w: weight codes of 2 to 8 bits, packed by `quant/packing.py` into panels of 16
//    columns: for each pair k, k+1 the 16 x 2 codes side by side, 32 bytes, or 16 bytes when codes
//    of at most 4 bits share a byte. Columns past the last are zero and never written.
// 2. Sums. A tile of R rows x 16 columns stays in registers while k runs through the panel, in
//    order; every weight byte loaded serves R rows. With a single row the sums of four pairs run
//    side by side instead, or each addition would wait for the one before.
// 3. Accumulation rule. A 32-bit sum is exact while K qw qa < 2^31. Past that the caller passes
//    `block`, the number of pairs for which it holds, and after each block the 32-bit sums are
//    added to 64-bit ones. Integer addition has no order, so all levels give the same integers.
// 4. Dequantisation, in float32: the sum rounded to nearest even, times the product of the scales,
//    plus the bias, each rounded by itself. The build forbids contraction into a fused multiply-
//    add, which would round once and differ from what torch computes in the last bit.
// 5. Cache. Rows go in blocks that fit in half a level-2 cache, and a panel is read through all
//    tiles of its block, so that it comes from memory once per block.
// 6. Threads. Pieces are (block of rows) x (run of panels); see pool.hpp.
//
// `skipless_quantize` makes the codes of float32 rows in the same call style: absmax (or a given
// step), division, round to nearest even, the same three roundings as `quant/fake.py`.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.hpp"
#include "pool.hpp"

namespace skipless {
namespace {

struct Product {
  const int16_t* x;
  const int8_t* w;
  int64_t rows, pairs, columns, block;
  int bytes_per_pair;  // 32, or 16 for packed nibbles
  const float* row_scale;
  int64_t row_scale_stride;  // 0: one scale for all rows
  const float* column_scale;  // padded to whole panels
  const float* bias;          // may be null
  float* y;                   // either y
  int64_t* sums;              // or the bare sums
};

template <bool nibbles>
inline Weights load(const int8_t* w) {
  if constexpr (nibbles) return load_nibbles(w);
  return load_bytes(w);
}

template <typename Sum>
void write(const Product& p, int64_t row, int64_t first, const Sum* sums) {
  const int64_t valid = std::min<int64_t>(kColumns, p.columns - first);
  if (p.sums) {
    for (int64_t c = 0; c < valid; ++c) p.sums[row * p.columns + first + c] = sums[c];
    return;
  }
  alignas(64) float out[kColumns];
  const float scale = p.row_scale[row * p.row_scale_stride];
  const float* column_scale = p.column_scale + first;
  for (int c = 0; c < kColumns; ++c) {
    out[c] = static_cast<float>(sums[c]) * (scale * column_scale[c]);
  }
  if (p.bias) {
    for (int64_t c = 0; c < valid; ++c) out[c] += p.bias[first + c];
  }
  std::copy(out, out + valid, p.y + row * p.columns + first);
}

// R rows x 16 columns; U pairs at a time into separate sums.
template <int R, int U, bool nibbles>
void tile(const Product& p, int64_t row, int64_t panel) {
  constexpr int step = nibbles ? 16 : 32;
  const int8_t* w = p.w + panel * p.pairs * step;
  const int16_t* x = p.x + row * 2 * p.pairs;
  const int64_t stride = 2 * p.pairs;
  const bool wide = p.block < p.pairs;
  int64_t totals[R][kColumns];
  if (wide) std::fill(&totals[0][0], &totals[0][0] + R * kColumns, 0);
  for (int64_t begin = 0; begin < p.pairs; begin += p.block) {
    const int64_t end = std::min(p.pairs, begin + p.block);
    Sums sums[U][R];
    for (int u = 0; u < U; ++u)
      for (int r = 0; r < R; ++r) sums[u][r] = zero();
    int64_t k = begin;
    for (; k + U <= end; k += U) {
      for (int u = 0; u < U; ++u) {
        const Weights codes = load<nibbles>(w + (k + u) * step);
        for (int r = 0; r < R; ++r) {
          sums[u][r] = add(sums[u][r], codes, spread(x + r * stride + 2 * (k + u)));
        }
      }
    }
    for (; k < end; ++k) {
      const Weights codes = load<nibbles>(w + k * step);
      for (int r = 0; r < R; ++r) {
        sums[0][r] = add(sums[0][r], codes, spread(x + r * stride + 2 * k));
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int u = 1; u < U; ++u) sums[0][r] = join(sums[0][r], sums[u][r]);
      alignas(64) int32_t narrow[kColumns];
      store(sums[0][r], narrow);
      if (!wide) {
        write(p, row + r, panel * kColumns, narrow);
      } else {
        for (int c = 0; c < kColumns; ++c) totals[r][c] += narrow[c];
      }
    }
  }
  if (wide) {
    for (int r = 0; r < R; ++r) write(p, row + r, panel * kColumns, totals[r]);
  }
}

// `left` rows, fewer than a whole tile: the largest tiles that fit, down to one row.
template <int R, bool nibbles>
void rest(const Product& p, int64_t row, int64_t panel, int64_t left) {
  if constexpr (R > 0) {
    if (left >= R) {
      tile<R, (R == 1 ? 4 : R <= 2 ? 2 : 1), nibbles>(p, row, panel);
      row += R, left -= R;
    }
    if (left > 0) rest<R - 1, nibbles>(p, row, panel, left);
  }
}

template <bool nibbles>
void multiply(const Product& p, int threads) {
  const int64_t panels = (p.columns + kColumns - 1) / kColumns;
  const int64_t half_cache = 256 << 10;
  const int64_t fit = half_cache / std::max<int64_t>(4 * p.pairs, 1) / kRows * kRows;
  const int64_t block = std::max<int64_t>(fit, kRows);
  const int64_t blocks = (p.rows + block - 1) / block;
  // Few enough pieces to be worth handing out, enough of them that no thread waits long.
  const int64_t wanted = threads > 1 ? 4 * threads : 1;
  const int64_t runs = std::clamp<int64_t>((wanted + blocks - 1) / blocks, 1, panels);
  Pool::run(blocks * runs, threads, [&](int64_t piece) {
    const int64_t first = piece / runs * block, last = std::min(p.rows, first + block);
    const int64_t run = piece % runs;
    for (int64_t panel = panels * run / runs; panel < panels * (run + 1) / runs; ++panel) {
      int64_t row = first;
      for (; row + kRows <= last; row += kRows) tile<kRows, 1, nibbles>(p, row, panel);
      if (row < last) rest<kRows - 1, nibbles>(p, row, panel, last - row);
    }
  });
}

// Of |x|, the largest, as the bits of a float32: these are ordered like the numbers, infinity comes
// after every number and NaN after infinity, and compilers vectorise the search.
uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

constexpr uint32_t kInfinity = 0x7f800000u;

// absmax / limit, at least the smallest normal number; NaN where a value was not finite.
float scale_of(uint32_t bits, int limit) {
  if (bits >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  const float divisor = static_cast<float>(limit);
  return std::max(largest, std::numeric_limits<float>::min() * divisor) / divisor;
}

void round_row(const float* x, int64_t count, float step, int limit, int16_t* codes) {
  const float bound = static_cast<float>(limit);
  for (int64_t i = 0; i < count; ++i) {
    const float code = std::nearbyintf(x[i] / step);
    codes[i] = static_cast<int16_t>(code > bound ? bound : code < -bound ? -bound : code);
  }
}

}  // namespace
}  // namespace skipless

extern "C" {

const char* skipless_level() { return skipless::kLevel; }

void skipless_multiply(const int16_t* x, const int8_t* w, int64_t rows, int64_t pairs,
                       int64_t columns, int64_t block, int nibbles, const float* row_scale,
                       int64_t row_scale_stride, const float* column_scale, const float* bias,
                       float* y, int64_t* sums, int threads) {
  const skipless::Product p{x, w, rows, pairs, columns, std::max<int64_t>(block, 1),
                            nibbles ? 16 : 32, row_scale, row_scale_stride, column_scale, bias,
                            y, sums};
  if (rows == 0 || columns == 0) return;
  nibbles ? skipless::multiply<true>(p, threads) : skipless::multiply<false>(p, threads);
}

// Codes of `rows` x `count` values into rows of `padded` int16, and the scales: one, or one a row.
// `step` > 0 is a given scale, which may clip; a row with NaN then gets the scale NaN (as many
// scales as rows). Otherwise absmax / limit, NaN where a value is not finite; codes are then 0.
void skipless_quantize(const float* x, int64_t rows, int64_t count, int64_t stride,
                       int64_t padded, int limit, int per_row, float step, int16_t* codes,
                       float* scales) {
  float shared = step;
  if (step <= 0 && !per_row) {
    uint32_t largest = 0;
    for (int64_t r = 0; r < rows; ++r) {
      largest = std::max(largest, skipless::largest_bits(x + r * stride, count));
    }
    shared = scales[0] = skipless::scale_of(largest, limit);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = x + r * stride;
    int16_t* to = codes + r * padded;
    float scale = shared;
    if (step > 0) {
      const bool nan = skipless::largest_bits(from, count) > skipless::kInfinity;
      scale = scales[r] = nan ? std::numeric_limits<float>::quiet_NaN() : step;
    } else if (per_row) {
      scale = scales[r] = skipless::scale_of(skipless::largest_bits(from, count), limit);
    }
    if (std::isnan(scale)) {
      std::fill(to, to + padded, static_cast<int16_t>(0));
    } else {
      skipless::round_row(from, count, scale, limit, to);
      std::fill(to + count, to + padded, static_cast<int16_t>(0));
    }
  }
}
}
