// Power sums of rows [n, width] by channel and by token, and rounding noise by token, in one pass.
//
//   channels [4, width] and tokens [4, n]: sums of x, x^2, x^3, x^4 in double
//   noise [widths, n]: sum of (round(x / step) - x / step)^2 in float, a step a width
//
// Four rows share one pass over the channels' sums, which would else be most of the traffic.
// Called through ctypes by kernel.py.
#include <cmath>
#include <cstdint>

namespace {

constexpr int kLanes = 8;

// Sums of one row's powers; lanes keep the additions independent, so that they vectorise.
void row_sums(const float* row, int64_t width, double* sums) {
  double lanes[4][kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const double x = row[j + l], y = x * x;
      lanes[0][l] += x;
      lanes[1][l] += y;
      lanes[2][l] += y * x;
      lanes[3][l] += y * y;
    }
  }
  for (; j < width; ++j) {
    const double x = row[j], y = x * x;
    lanes[0][0] += x;
    lanes[1][0] += y;
    lanes[2][0] += y * x;
    lanes[3][0] += y * y;
  }
  for (int k = 0; k < 4; ++k) {
    double total = 0;
    for (int l = 0; l < kLanes; ++l) total += lanes[k][l];
    sums[k] = total;
  }
}

float row_noise(const float* row, int64_t width, float step) {
  float lanes[2 * kLanes] = {};
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) {
    for (int l = 0; l < 2 * kLanes; ++l) {
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

template <int Rows>
void add_channels(const float* rows, int64_t width, double* channels) {
  double *c1 = channels, *c2 = c1 + width, *c3 = c2 + width, *c4 = c3 + width;
  for (int64_t j = 0; j < width; ++j) {
    double s1 = 0, s2 = 0, s3 = 0, s4 = 0;
    for (int r = 0; r < Rows; ++r) {
      const double x = rows[r * width + j], y = x * x;
      s1 += x;
      s2 += y;
      s3 += y * x;
      s4 += y * y;
    }
    c1[j] += s1;
    c2[j] += s2;
    c3[j] += s3;
    c4[j] += s4;
  }
}

}  // namespace

extern "C" void skipless_sums(const float* rows, int64_t n, int64_t width, const float* steps,
                              int64_t num_steps, double* channels, double* tokens, float* noise) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) add_channels<4>(rows + i * width, width, channels);
  for (; i < n; ++i) add_channels<1>(rows + i * width, width, channels);
  for (i = 0; i < n; ++i) {
    const float* row = rows + i * width;
    double sums[4];
    row_sums(row, width, sums);
    for (int k = 0; k < 4; ++k) tokens[k * n + i] = sums[k];
    for (int64_t b = 0; b < num_steps; ++b) noise[b * n + i] = row_noise(row, width, steps[b]);
  }
}
