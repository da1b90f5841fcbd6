// The calls of decode.hpp, made of the products of gemm.cpp, which includes this at its end.
#pragma once

namespace skipless {
namespace {

// Products of one float32 input with several weights; codes that fit the next one are made once.
class Products {
 public:
  Products(const float* x, int64_t rows, int64_t width, int threads)
      : x_{x, rows, width, width}, threads_(threads) {}

  void multiply(const Linear& layer, float* y) {
    const bool narrow = layer.form >= kQuads;
    const int64_t group = layer.form == kQuads ? 4 : layer.form == kQuadNibbles ? 8 : 2;
    const int64_t padded = layer.groups * group;
    if (!last_ || narrow != narrow_ || padded != padded_ || layer.limit != last_->limit ||
        layer.per_row != last_->per_row || layer.step != last_->step) {
      scales_ = scratch<float, kScales>(x_.rows);
      if (narrow) {
        codes_ = scratch<int8_t>(x_.rows * padded);
        make_codes(x_, padded, layer.limit, layer.per_row != 0, layer.step,
                   static_cast<int8_t*>(codes_), scales_, threads_);
      } else {
        codes_ = scratch<int16_t>(x_.rows * padded);
        make_codes(x_, padded, layer.limit, layer.per_row != 0, layer.step,
                   static_cast<int16_t*>(codes_), scales_, threads_);
      }
      last_ = &layer, narrow_ = narrow, padded_ = padded;
      const int64_t count = layer.per_row || layer.step > 0 ? x_.rows : 1;
      for (int64_t i = 0; i < count; ++i) finite_ = finite_ && !std::isnan(scales_[i]);
    }
    const Product p{codes_, layer.w, x_.rows, layer.groups, layer.columns,
                    std::max<int64_t>(layer.block, 1), nullptr, scales_,
                    layer.per_row || layer.step > 0 ? 1 : 0, layer.column_scale, layer.bias, y,
                    nullptr};
    skipless::multiply(p, static_cast<Form>(layer.form), threads_);
  }

  bool finite() const { return finite_; }

 private:
  const Rows x_;
  const int threads_;
  const Linear* last_ = nullptr;
  bool narrow_ = false, finite_ = true;
  int64_t padded_ = 0;
  void* codes_ = nullptr;
  float* scales_ = nullptr;
};

}  // namespace
}  // namespace skipless

extern "C" {

// One new token of each of `rows` sequences, x [B, D], through attention; y [B, D]. `cosine` and
// `sine` [H K] may be null. Returns a bit for each input that was not finite: 1 that of q, k and v,
// 2 keys, 4 values, 8 that of o.
int skipless_attention_step(const skipless::AttentionLayer* layer, const float* x, int64_t rows,
                            int64_t width, const float* cosine, const float* sine,
                            const skipless::Store* keys, const skipless::Store* values,
                            int64_t past, float* y, int threads) {
  using namespace skipless;
  const int64_t heads = layer->heads, groups = layer->groups, size = layer->size;
  const int64_t inner = heads * size, shared = groups * size;
  // One room for all: normed, q, k, v, mixed, turned.
  float* room = scratch<float, kStep>(rows * (width + 2 * inner + 2 * shared) + inner);
  float* q = room + rows * width;
  float *k = q + rows * inner, *v = k + rows * shared, *mixed = v + rows * shared;
  float* turned = mixed + rows * inner;
  if (layer->norm.kind) {
    normalize(layer->norm, x, rows, width, room);
    x = room;
  }
  Products in(x, rows, width, threads);
  in.multiply(layer->q, q);
  in.multiply(layer->k, k);
  in.multiply(layer->v, v);
  int bad = in.finite() ? 0 : 1;
  if (cosine) {
    rotate(q, rows, heads, size, cosine, sine, turned);
    rotate(k, rows, groups, size, cosine, sine, turned);
  }
  if (!remember(layer->key, *keys, k, rows, groups, size, past)) bad |= 2;
  if (!remember(layer->value, *values, v, rows, groups, size, past)) bad |= 4;
  // Short texts are done before another thread has woken.
  const int64_t pieces = past < 64 ? 1 : std::min<int64_t>(rows * heads, 2 * threads);
  Pool::run(pieces, threads, [&](int64_t piece) {
    float* unpacked = scratch<float, kLogits>(size + 1 + past + 1);
    float* logits = unpacked + size + 1;
    const int64_t all = rows * heads;
    for (int64_t at = all * piece / pieces; at < all * (piece + 1) / pieces; ++at) {
      const int64_t h = at % heads, index = at / heads * groups + h / (heads / groups);
      const Head key{layer->key, *keys, index, size, unpacked};
      const Head value{layer->value, *values, index, size, unpacked};
      attend(q + at * size, key, value, past + 1, layer->head_scale[h],
             layer->identity_bias ? layer->identity_bias[h] : 0.0f, logits, mixed + at * size);
    }
  });
  Products out(mixed, rows, inner, threads);
  out.multiply(layer->o, y);
  return bad | (out.finite() ? 0 : 8);
}

// The same through an MLP. Bits: 1 the input of up (and gate), 2 that of down.
int skipless_mlp_step(const skipless::MlpLayer* layer, const float* x, int64_t rows, int64_t width,
                      float* y, int threads) {
  using namespace skipless;
  const int64_t inner = layer->up.columns;
  float* room = scratch<float, kStep>(rows * (width + 2 * inner));
  float *up = room + rows * width, *gate = up + rows * inner;
  if (layer->norm.kind) {
    normalize(layer->norm, x, rows, width, room);
    x = room;
  }
  Products in(x, rows, width, threads);
  in.multiply(layer->up, up);
  if (layer->gate.w) in.multiply(layer->gate, gate);
  activate(layer->activation, gate, up, rows * inner);
  Products out(up, rows, inner, threads);
  out.multiply(layer->down, y);
  return (in.finite() ? 0 : 1) | (out.finite() ? 0 : 2);
}

// One new token of each of `rows` sequences through all sublayers; x [B, D] becomes the stream
// after the last, `embedding` [B, D] is what the first received. Returns -1, or 16 times the number
// of the first sublayer with an input that was not finite plus its bits.
int64_t skipless_stack_step(const skipless::Sublayer* layers, int64_t count, float* x,
                            const float* embedding, int64_t rows, int64_t width,
                            const float* cosine, const float* sine, int64_t past, int threads) {
  using namespace skipless;
  float* branch = scratch<float, kBranch>(2 * rows * width);
  float* normed = branch + rows * width;
  int64_t first = -1;
  for (int64_t n = 0; n < count; ++n) {
    const Sublayer& layer = layers[n];
    int bad = 0;
    if (layer.kind == 0) {
      bad = skipless_attention_step(layer.attention, x, rows, width, cosine, sine, &layer.keys,
                                    &layer.values, past, branch, threads);
    } else if (layer.kind == 1) {
      bad = skipless_mlp_step(layer.mlp, x, rows, width, branch, threads);
    }
    if (bad && first < 0) first = 16 * n + bad;
    for (int64_t r = 0; layer.kind < 2 && r < rows; ++r) {
      join(layer.join, x + r * width, branch + r * width, embedding + r * width, width);
    }
    if (layer.join.after.kind) {
      normalize(layer.join.after, x, rows, width, normed);
      std::copy(normed, normed + rows * width, x);
    }
  }
  return first;
}

// y [B, N] = x [B, K] w^T + bias in float32, for a few rows: w [N, K] is read once, and asked for
// ahead. The order of a sum is this function's own.
void skipless_dense(const float* x, const float* w, const float* bias, int64_t rows, int64_t inputs,
                    int64_t columns, float* y, int threads) {
  using namespace skipless;
  const int64_t pieces = threads > 1 ? 4 * threads : 1;
  Pool::run(pieces, threads, [&](int64_t piece) {
    for (int64_t n = columns * piece / pieces; n < columns * (piece + 1) / pieces; ++n) {
      const float* row = w + n * inputs;
      for (int64_t k = 0; k < inputs; k += 16) {
        __builtin_prefetch(reinterpret_cast<const char*>(row + k) + kAhead);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float sum = dot(x + r * inputs, row, inputs);
        y[r * columns + n] = bias ? sum + bias[n] : sum;
      }
    }
  });
}
}
