// What one pass over rows [n, width] needs: largest values, power sums, rounding noise.
//
//   largest [n]: the largest |x| of each row, NaN or infinity where it holds one
//   channels [4, width] and tokens [4, n]: sums of x, x^2, x^3, x^4 in double
//   noise [levels, n]: sum of (round(x / step) - x / step)^2 in float, where a level count L gives
//     step = (largest of all) / L
//
// Returns 1; 0, and only `largest` filled in, where a value is not finite. A few rows at a time go
// through everything, so that memory is read once for the largest values and once for the rest; they
// share one pass over the channels' sums, which would else be most of the traffic. Called through
// ctypes by kernel.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 8, kRows = 4;  // a register of doubles; rows whose sums fit into registers
#else
constexpr int kLanes = 4, kRows = 2;
#endif
constexpr int kWide = 16;
constexpr uint32_t kInfinity = 0x7f800000;

// The bits of |x| are ordered as numbers, infinity and then NaN above all others.
uint32_t largest_bits(const float* row, int64_t width) {
  uint32_t lanes[kWide] = {};
  int64_t j = 0;
  for (; j + kWide <= width; j += kWide) {
    for (int l = 0; l < kWide; ++l) {
      uint32_t bits;
      std::memcpy(&bits, row + j + l, 4);
      bits &= 0x7fffffff;
      lanes[l] = bits > lanes[l] ? bits : lanes[l];
    }
  }
  uint32_t found = 0;
  for (uint32_t lane : lanes) found = std::max(found, lane);
  for (; j < width; ++j) {
    uint32_t bits;
    std::memcpy(&bits, row + j, 4);
    found = std::max(found, bits & 0x7fffffff);
  }
  return found;
}

float row_noise(const float* row, int64_t width, float step) {
  float lanes[kWide] = {};
  int64_t j = 0;
  for (; j + kWide <= width; j += kWide) {
    for (int l = 0; l < kWide; ++l) {
      const float t = row[j + l] / step, d = std::nearbyint(t) - t;
      lanes[l] += d * d;
    }
  }
  for (; j < width; ++j) {
    const float t = row[j] / step, d = std::nearbyint(t) - t;
    lanes[0] += d * d;
  }
  float total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

// Vectors of GCC and Clang: left to itself the compiler keeps the sums of several rows in memory.
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

Doubles load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Doubles);
}

void add(double* to, Doubles sum) {
  Doubles x;
  std::memcpy(&x, to, sizeof x);
  x += sum;
  std::memcpy(to, &x, sizeof x);
}

// Adds the powers of some rows to the channels' sums; `tokens` [4, n] gets those of each row.
template <int Rows>
void add_rows(const float* rows, int64_t n, int64_t width, double* channels, double* tokens) {
  double *c1 = channels, *c2 = c1 + width, *c3 = c2 + width, *c4 = c3 + width;
  Doubles lanes[Rows][4] = {};
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    Doubles s1 = {}, s2 = {}, s3 = {}, s4 = {};
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Doubles x = load(rows + r * width + j), y = x * x, z = y * x, w = y * y;
      s1 += x;
      s2 += y;
      s3 += z;
      s4 += w;
      lanes[r][0] += x;
      lanes[r][1] += y;
      lanes[r][2] += z;
      lanes[r][3] += w;
    }
    add(c1 + j, s1);
    add(c2 + j, s2);
    add(c3 + j, s3);
    add(c4 + j, s4);
  }
  for (; j < width; ++j) {
    for (int r = 0; r < Rows; ++r) {
      const double x = rows[r * width + j], y = x * x;
      const double powers[4] = {x, y, y * x, y * y};
      for (int k = 0; k < 4; ++k) {
        channels[k * width + j] += powers[k];
        lanes[r][k][0] += powers[k];
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int k = 0; k < 4; ++k) {
      double total = 0;
      for (int l = 0; l < kLanes; ++l) total += lanes[r][k][l];
      tokens[k * n + r] = total;
    }
  }
}

}  // namespace

extern "C" int skipless_sums(const float* rows, int64_t n, int64_t width, const double* levels,
                             int64_t num_levels, float* largest, double* channels, double* tokens,
                             float* noise) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = largest_bits(rows + i * width, width);
    std::memcpy(largest + i, &bits, 4);
    most = std::max(most, bits);
  }
  if (most >= kInfinity) return 0;
  float range;
  std::memcpy(&range, &most, 4);
  int64_t i = 0;
  while (i < n) {
    const float* block = rows + i * width;
    const int64_t count = n - i >= kRows ? kRows : 1;
    if (count == kRows) {
      add_rows<kRows>(block, n, width, channels, tokens + i);
    } else {
      add_rows<1>(block, n, width, channels, tokens + i);
    }
    for (int64_t b = 0; b < num_levels; ++b) {
      const float step = static_cast<float>(range / levels[b]);
      for (int64_t r = 0; r < count; ++r) {
        noise[b * n + i + r] = step > 0 ? row_noise(block + r * width, width, step) : 0.0f;
      }
    }
    i += count;
  }
  return 1;
}
