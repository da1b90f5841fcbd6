// y[m][n] = (s_a[m] * s_w[n]) * sum_k x[m][k] * w[n][k] + bias[n], the sum in exact integers (Q4).
//
// 1. Operands. x: activation codes of 2 to 16 bits, or float32 rows of which the codes are made
//    first. w: weight codes of 2 to 8 bits, packed by `quant/packing.py` into panels of 16 columns
//    in one of two forms, pairs and quads (lanes.hpp), whole or as nibbles. Columns past the last
//    are never written, inputs past the last meet codes that are zero.
// 2. Sums. A tile of some rows x some panels stays in registers while k runs through the panels;
//    every weight loaded serves all rows, every spread code all panels. A single row has four sums
//    for each column, joined in the end, or each addition would wait for the one before; it reads
//    the weights in the order of memory.
// 3. Accumulation rule. A 32-bit sum is exact while K qw qa < 2^31. Past that the caller passes
//    `block`, the number of groups for which it holds, and after each block the 32-bit sums are
//    added to 64-bit ones. Integer addition has no order, so all levels give the same integers.
// 4. Dequantisation, in float32: the sum rounded to nearest even, times the product of the scales,
//    plus the bias, each rounded by itself. The build forbids contraction into a fused multiply-
//    add, which would round once and differ from what torch computes in the last bit.
// 5. Cache. Rows go in blocks that fit in half a level-2 cache, and a panel is read through all
//    tiles of its block, so that it comes from memory once per block.
// 6. Threads. Pieces are (block of rows) x (run of panels); see pool.hpp.

#include <utility>
#include <vector>

#include "codes.hpp"
#include "decode.hpp"
#include "lanes.hpp"

namespace skipless {
namespace {

// A single row waits for the weights to come from memory; processors alone do not ask early enough.
// In bytes; of 1024 to 32768 the shortest that is fast on Zen 5, by 15 % there and 20 % with AVX2.
constexpr int64_t kAhead = 8192;

struct Product {
  const void* x;  // codes, rows of `groups` whole groups
  const int8_t* w;
  int64_t rows, groups, columns, block;
  const int32_t* offsets;  // to take off the sums of a row; may be null
  const float* row_scale;
  int64_t row_scale_stride;   // 0: one scale for all rows
  const float* column_scale;  // padded to whole panels
  const float* bias;          // may be null
  float* y;                   // either y
  int64_t* sums;              // or the bare sums
};

// Not inlined: a tile has many, and they are the lesser part of its time.
template <typename Sum>
__attribute__((noinline)) void write(const Product& p, int64_t row, int64_t first, const Sum* sums) {
  const int64_t valid = std::min<int64_t>(kColumns, p.columns - first);
  const int32_t offset = p.offsets ? p.offsets[row] : 0;
  Sum exact[kColumns];
  for (int c = 0; c < kColumns; ++c) {
    // unsigned: a sum that wrapped comes back, without undefined behaviour
    exact[c] = static_cast<Sum>(static_cast<std::make_unsigned_t<Sum>>(sums[c]) -
                                static_cast<std::make_unsigned_t<Sum>>(offset));
  }
  if (p.sums) {
    for (int64_t c = 0; c < valid; ++c) p.sums[row * p.columns + first + c] = exact[c];
    return;
  }
  float out[kColumns];
  const float scale = p.row_scale[row * p.row_scale_stride];
  const float* column_scale = p.column_scale + first;
  for (int c = 0; c < kColumns; ++c) {
    out[c] = static_cast<float>(exact[c]) * (scale * column_scale[c]);
  }
  float* y = p.y + row * p.columns + first;
  if (valid == kColumns) {
    if (p.bias) {
      for (int c = 0; c < kColumns; ++c) out[c] += p.bias[first + c];
    }
    std::memcpy(y, out, sizeof out);
    return;
  }
  for (int64_t c = 0; c < valid; ++c) y[c] = p.bias ? out[c] + p.bias[first + c] : out[c];
}

template <int... I, typename Function>
inline void each(std::integer_sequence<int, I...>, Function&& function) {
  (function(std::integral_constant<int, I>{}), ...);
}

// Calls function(0), ..., function(N - 1) with constants, so that what they index stays in
// registers; compilers unroll a loop too late for that.
template <int N, typename Function>
inline void each(Function&& function) {
  each(std::make_integer_sequence<int, N>{}, std::forward<Function>(function));
}

// R rows x P panels; U groups at a time into sums of their own.
template <typename Lanes, int R, int P, int U = R * P == 1 ? 4 : 1>
void tile(const Product& p, int64_t row, int64_t panel) {
  const int64_t panel_bytes = p.groups * Lanes::kBytes, stride = p.groups * Lanes::kGroup;
  const int8_t* w = p.w + panel * panel_bytes;
  const typename Lanes::Code* x = static_cast<const typename Lanes::Code*>(p.x) + row * stride;
  const bool wide = p.block < p.groups;
  int64_t totals[R * P][kColumns];
  if (wide) std::fill(&totals[0][0], &totals[0][0] + R * P * kColumns, 0);
  for (int64_t begin = 0; begin < p.groups; begin += p.block) {
    const int64_t end = std::min(p.groups, begin + p.block);
    typename Lanes::Sums sums[U * R * P];
    each<U * R * P>([&](auto i) { sums[i] = Lanes::zero(); });
    const auto take = [&](int64_t k, auto u) {
      typename Lanes::Weights codes[P];
      each<P>([&](auto j) {
        const int8_t* from = w + j * panel_bytes + k * Lanes::kBytes;
        if constexpr (R == 1) __builtin_prefetch(from + kAhead);
        codes[j] = Lanes::load(from);
      });
      each<R>([&](auto r) {
        const auto spread = Lanes::spread(x + r * stride + k * Lanes::kGroup);
        each<P>([&](auto j) {
          constexpr int at = (u * R + r) * P + j;
          sums[at] = Lanes::add(sums[at], codes[j], spread);
        });
      });
    };
    int64_t k = begin;
    for (; k + U <= end; k += U) each<U>([&](auto u) { take(k + u, u); });
    for (; k < end; ++k) take(k, std::integral_constant<int, 0>{});
    if constexpr (U > 1) each<U - 1>([&](auto u) { sums[0] = Lanes::join(sums[0], sums[u + 1]); });
    each<R * P>([&](auto i) {
      alignas(64) int32_t narrow[kColumns];
      Lanes::store(sums[i], narrow);
      if (!wide) {
        write(p, row + i / P, (panel + i % P) * kColumns, narrow);
      } else {
        for (int c = 0; c < kColumns; ++c) totals[i][c] += narrow[c];
      }
    });
  }
  if (!wide) return;
  for (int i = 0; i < R * P; ++i) write(p, row + i / P, (panel + i % P) * kColumns, totals[i]);
}

// Rows first..last in tiles of R and, for what is left, of half as many, down to one.
template <typename Lanes, int R, int P>
void rows(const Product& p, int64_t row, int64_t last, int64_t panel) {
  for (; row + R <= last; row += R) tile<Lanes, R, P>(p, row, panel);
  if constexpr (R > 1) {
    if (row < last) rows<Lanes, R / 2, P>(p, row, last, panel);
  }
}

template <typename Lanes, int R, int P>
void multiply_tiles(const Product& p, int threads) {
  const int64_t panels = (p.columns + kColumns - 1) / kColumns, strips = (panels + P - 1) / P;
  const int64_t row_bytes = p.groups * Lanes::kGroup * sizeof(typename Lanes::Code);
  const int64_t half_cache = 256 << 10;
  const int64_t block = std::max<int64_t>(half_cache / std::max<int64_t>(row_bytes, 1) / R * R, R);
  const int64_t blocks = (p.rows + block - 1) / block;
  // Few enough pieces to be worth handing out, enough of them that no thread waits long.
  const int64_t wanted = threads > 1 ? 4 * threads : 1;
  const int64_t runs = std::clamp<int64_t>((wanted + blocks - 1) / blocks, 1, strips);
  Pool::run(blocks * runs, threads, [&](int64_t piece) {
    const int64_t first = piece / runs * block, last = std::min(p.rows, first + block);
    const int64_t run = piece % runs;
    for (int64_t strip = strips * run / runs; strip < strips * (run + 1) / runs; ++strip) {
      int64_t panel = strip * P;
      if (panel + P <= panels) {
        rows<Lanes, R, P>(p, first, last, panel);
      } else if constexpr (P > 1) {
        for (; panel < panels; ++panel) rows<Lanes, R, 1>(p, first, last, panel);
      }
    }
  });
}

template <typename Lanes>
void multiply(const Product& p, int threads) {
  if (p.rows == 1) {
    multiply_tiles<Lanes, 1, 1>(p, threads);
  } else {
    multiply_tiles<Lanes, Lanes::kRows, Lanes::kPanels>(p, threads);
  }
}

// Room for `count` values, one a thread and use; it grows and is kept.
enum Use { kCodes, kScales, kStep, kLogits, kBranch };
template <typename Value, Use use = kCodes>
Value* scratch(int64_t count) {
  thread_local std::vector<Value> room;
  if (static_cast<int64_t>(room.size()) < count) room.resize(count);
  return room.data();
}

#if defined(SKIPLESS_QUADS)
// Offset times the sum of each row's codes.
void find_offsets(const int8_t* codes, int64_t rows, int64_t width, int32_t offset, int32_t* to,
                  int threads) {
  const int64_t share = std::max<int64_t>(1, 65536 / width), pieces = (rows + share - 1) / share;
  Pool::run(pieces, threads, [&](int64_t piece) {
    for (int64_t r = piece * share; r < std::min(rows, (piece + 1) * share); ++r) {
      int32_t sum = 0;
      for (int64_t k = 0; k < width; ++k) sum += codes[r * width + k];
      to[r] = static_cast<int32_t>(static_cast<uint32_t>(sum) * static_cast<uint32_t>(offset));
    }
  });
}

template <bool nibbles>
void multiply_quads(Product p, const int8_t* codes, int threads) {
  using Lanes = Quads<nibbles>;
  int32_t* offsets = scratch<int32_t>(p.rows);
  find_offsets(codes, p.rows, p.groups * Lanes::kGroup, Lanes::kOffset, offsets, threads);
  p.x = codes;
  p.offsets = offsets;
  multiply<Lanes>(p, threads);
}
#endif

// The forms of packed weights; `quant/packing.py` counts them the same.
enum Form { kPairs = 0, kPairNibbles = 1, kQuads = 2, kQuadNibbles = 3 };

void multiply(const Product& p, Form form, int threads) {
  if (form == kPairs) multiply<Pairs<false>>(p, threads);
  if (form == kPairNibbles) multiply<Pairs<true>>(p, threads);
#if defined(SKIPLESS_QUADS)
  if (form == kQuads) multiply_quads<false>(p, static_cast<const int8_t*>(p.x), threads);
  if (form == kQuadNibbles) multiply_quads<true>(p, static_cast<const int8_t*>(p.x), threads);
#endif
}

}  // namespace
}  // namespace skipless

extern "C" {

const char* skipless_level() { return skipless::kLevel; }

// Whether this build has the quads.
int skipless_has_quads() {
#if defined(SKIPLESS_QUADS)
  return 1;
#else
  return 0;
#endif
}

// From int16 codes, rows of `groups` whole groups.
void skipless_multiply(const int16_t* x, const int8_t* w, int form, int64_t rows, int64_t groups,
                       int64_t columns, int64_t block, const float* row_scale,
                       int64_t row_scale_stride, const float* column_scale, const float* bias,
                       float* y, int64_t* sums, int threads) {
  if (rows == 0 || columns == 0) return;
  skipless::Product p{x, w, rows, groups, columns, std::max<int64_t>(block, 1), nullptr, row_scale,
                      row_scale_stride, column_scale, bias, y, sums};
  if (form >= skipless::kQuads) {
    const int64_t count = rows * groups * (form == skipless::kQuads ? 4 : 8);
    int8_t* narrow = skipless::scratch<int8_t>(count);
    for (int64_t i = 0; i < count; ++i) narrow[i] = static_cast<int8_t>(x[i]);
    p.x = narrow;
  }
  skipless::multiply(p, static_cast<skipless::Form>(form), threads);
}

// From float32 rows: codes (see codes.hpp) and product in one call. Writes the scales.
void skipless_linear(const float* x, int64_t rows, int64_t count, int64_t stride, int limit,
                     int per_row, float step, const int8_t* w, int form, int64_t groups,
                     int64_t columns, int64_t block, const float* column_scale, const float* bias,
                     float* scales, float* y, int threads) {
  if (rows == 0 || columns == 0) return;
  const skipless::Rows from{x, rows, count, stride};
  skipless::Product p{nullptr, w, rows, groups, columns, std::max<int64_t>(block, 1), nullptr,
                      scales, per_row || step > 0 ? 1 : 0, column_scale, bias, y, nullptr};
  if (form >= skipless::kQuads) {
    const int64_t padded = groups * (form == skipless::kQuads ? 4 : 8);
    int8_t* codes = skipless::scratch<int8_t>(rows * padded);
    skipless::make_codes(from, padded, limit, per_row != 0, step, codes, scales, threads);
    p.x = codes;
  } else {
    int16_t* codes = skipless::scratch<int16_t>(rows * groups * 2);
    skipless::make_codes(from, groups * 2, limit, per_row != 0, step, codes, scales, threads);
    p.x = codes;
  }
  skipless::multiply(p, static_cast<skipless::Form>(form), threads);
}

// int16 codes of float32 rows in rows of `padded`, and their scales; see codes.hpp.
void skipless_quantize(const float* x, int64_t rows, int64_t count, int64_t stride,
                       int64_t padded, int limit, int per_row, float step, int16_t* codes,
                       float* scales, int threads) {
  const skipless::Rows from{x, rows, count, stride};
  skipless::make_codes(from, padded, limit, per_row != 0, step, codes, scales, threads);
}
}

#include "steps.hpp"
