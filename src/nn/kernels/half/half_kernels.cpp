#include "tessera/nn/kernels/half/half_kernels.h"

#include <algorithm>
#include <string>

namespace tessera::nn {

using namespace kernels;  // NOLINT: this file wraps them

namespace {

/// Elements that are converted to f32 at once if a kernel can be split: 1 MiB of f32, which stays in the cache.
constexpr std::size_t kChunk = std::size_t{1} << 18U;

/// Calls function(first, count) over [0, total) in chunks whose rows have `width` elements.
template <class Function>
void in_chunks(std::size_t total, std::size_t width, Function&& function) {
  const std::size_t chunk = std::max<std::size_t>(1, kChunk / std::max<std::size_t>(1, width));
  for (std::size_t at = 0; at < total; at += chunk) function(at, std::min(chunk, total - at));
}
std::size_t chunk_rows(std::size_t total, std::size_t width) {
  return std::min(total, std::max<std::size_t>(1, kChunk / std::max<std::size_t>(1, width)));
}
std::size_t chunk_elements(std::size_t total, std::size_t width) { return chunk_rows(total, width) * width; }

template <class P>
P* shifted(P* pointer, std::size_t by) {
  return pointer == nullptr ? nullptr : pointer + by;
}

/// y = function(inputs...) element by element; `old`: the function also reads y's value.
template <class T, std::size_t n, class Function>
void by_elements(F32Scratch<T>& scratch, std::size_t count, const T* const (&inputs)[n], Function&& function) {
  float* f32[n];
  for (std::size_t i = 0; i < n; ++i) f32[i] = scratch.room_for(inputs[i], chunk_elements(count, 1));
  in_chunks(count, 1, [&](std::size_t at, std::size_t length) {
    for (std::size_t i = 0; i < n; ++i) scratch.load(shifted(inputs[i], at), f32[i], length);
    function(f32, at, length);
  });
}

/// Fills out with the random numbers that function(range, values) writes in f32.
template <class T, class Function>
void fill_range(F32Scratch<T>& scratch, const StreamRange& range, T* out, Function&& function) {
  const std::size_t count = range.end - range.begin;
  float* values = scratch.room(chunk_elements(count, 1));
  in_chunks(count, 1, [&](std::size_t at, std::size_t length) {
    function({range.stream, range.begin + at, range.begin + at + length}, values);
    scratch.store(values, out + at, length);
  });
}

}  // namespace

template <class T>
void HalfKernels<T>::fill(Stream& s, T value, T* out, std::size_t count) {
  F32Scratch<T> scratch(all_, memory_, s);
  float* values = scratch.room(chunk_elements(count, 1));
  f32_kernels().fill(s, static_cast<float>(value), values, chunk_elements(count, 1));
  in_chunks(count, 1, [&](std::size_t at, std::size_t length) { scratch.store(values, out + at, length); });
}

template <class T>
void HalfKernels<T>::fill_normal(Stream& s, const NormalFill<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  fill_range(scratch, a.range, a.out, [&](const StreamRange& range, float* values) {
    f32_kernels().fill_normal(s, {range, a.mean, a.deviation, values});
  });
}

template <class T>
void HalfKernels<T>::fill_uniform(Stream& s, const UniformFill<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  fill_range(scratch, a.range, a.out, [&](const StreamRange& range, float* values) {
    f32_kernels().fill_uniform(s, {range, a.low, a.high, values});
  });
}

template <class T>
void HalfKernels<T>::assign(Stream& s, const AssignArgs<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  by_elements<T>(scratch, a.count, {a.x, a.accumulate ? a.out : nullptr},
                 [&](float* const* in, std::size_t at, std::size_t length) {
                   if (a.accumulate) f32_kernels().assign(s, {in[0], in[1], length, true});
                   scratch.store(in[a.accumulate ? 1 : 0], a.out + at, length);
                 });
}

template <class T>
void HalfKernels<T>::add(Stream& s, const AddArgs<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  by_elements<T>(scratch, a.count, {a.a, a.b}, [&](float* const* in, std::size_t at, std::size_t length) {
    f32_kernels().add(s, {in[0], in[1], in[0], length});
    scratch.store(in[0], a.out + at, length);
  });
}

template <class T>
void HalfKernels<T>::scale(Stream& s, const ScaleArgs<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  by_elements<T>(scratch, a.count, {a.x, a.accumulate ? a.out : nullptr},
                 [&](float* const* in, std::size_t at, std::size_t length) {
                   float* out = in[a.accumulate ? 1 : 0];
                   f32_kernels().scale(s, {in[0], a.factor, out, length, a.accumulate});
                   scratch.store(out, a.out + at, length);
                 });
}

template <class T>
void HalfKernels<T>::transpose(Stream& s, const TransposeArgs<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const std::size_t matrix = a.rows * a.columns;
  float* in = scratch.room(chunk_elements(a.batch, matrix));
  float* out = scratch.room(chunk_elements(a.batch, matrix));
  in_chunks(a.batch, matrix, [&](std::size_t at, std::size_t batch) {
    scratch.load(a.in + at * matrix, in, batch * matrix);
    f32_kernels().transpose(s, {in, out, batch, a.rows, a.columns});
    scratch.store(out, a.out + at * matrix, batch * matrix);
  });
}

template <class T>
void HalfKernels<T>::norm_parts(Stream& s, const NormParts<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const std::size_t chunk = chunk_elements(a.count, 1);
  float* in = scratch.room(chunk);
  if (a.count <= chunk) {
    for (std::size_t slice = 0; slice < a.slices; ++slice) {
      scratch.load(a.x + slice * a.count, in, a.count);
      f32_kernels().norm_parts(s, {.norm = a.norm, .x = in, .count = a.count, .out = a.out + slice});
    }
    return;
  }
  const std::size_t chunks = (a.count + chunk - 1) / chunk;
  auto* parts = reinterpret_cast<double*>(scratch.room(2 * chunks));
  const Norm sum = a.norm == Norm::infinity ? a.norm : Norm::one;  // no partial result is negative
  for (std::size_t slice = 0; slice < a.slices; ++slice) {
    in_chunks(a.count, 1, [&](std::size_t at, std::size_t length) {
      scratch.load(a.x + slice * a.count + at, in, length);
      f32_kernels().norm_parts(s, {.norm = a.norm, .x = in, .count = length, .out = parts + at / chunk});
    });
    all_.f64_kernels()->norm_parts(s, {.norm = sum, .x = parts, .count = chunks, .out = a.out + slice});
  }
}

template <class T>
void HalfKernels<T>::activation_forward(Stream& s, const ActivationForward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  by_elements<T>(scratch, a.count, {a.x}, [&](float* const* in, std::size_t at, std::size_t length) {
    f32_kernels().activation_forward(s, {a.kind, in[0], in[0], length});
    scratch.store(in[0], a.y + at, length);
  });
}

template <class T>
void HalfKernels<T>::activation_backward(Stream& s, Activation kind, const ActivationBackward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  by_elements<T>(scratch, a.count, {a.x, a.dy, a.accumulate ? a.dx : nullptr},
                 [&](float* const* in, std::size_t at, std::size_t length) {
                   float* dx = in[a.accumulate ? 2 : 1];
                   f32_kernels().activation_backward(s, kind, {in[0], in[1], dx, length, a.accumulate});
                   scratch.store(dx, a.dx + at, length);
                 });
}

template <class T>
void HalfKernels<T>::swiglu_forward(Stream& s, const SwigluForward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  float* y = scratch.room(chunk_elements(a.count, 1));
  by_elements<T>(scratch, a.count, {a.gate, a.up}, [&](float* const* in, std::size_t at, std::size_t length) {
    f32_kernels().swiglu_forward(s, {in[0], in[1], y, length});
    scratch.store(y, a.y + at, length);
  });
}

template <class T>
void HalfKernels<T>::swiglu_backward(Stream& s, const SwigluBackward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  float* dgate = scratch.room_for(a.dgate, chunk_elements(a.count, 1));
  float* dup = scratch.room_for(a.dup, chunk_elements(a.count, 1));
  by_elements<T>(scratch, a.count, {a.gate, a.up, a.dy}, [&](float* const* in, std::size_t at, std::size_t length) {
    if (a.accumulate_dgate) scratch.load(shifted(a.dgate, at), dgate, length);
    if (a.accumulate_dup) scratch.load(shifted(a.dup, at), dup, length);
    f32_kernels().swiglu_backward(s, {in[0], in[1], in[2], dgate, dup, length, a.accumulate_dgate, a.accumulate_dup});
    scratch.store(dgate, shifted(a.dgate, at), length);
    scratch.store(dup, shifted(a.dup, at), length);
  });
}

template <class T>
void HalfKernels<T>::dropout(Stream& s, const DropoutArgs<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  float* x = scratch.room(chunk_elements(a.samples, a.elements));
  float* y = a.accumulate ? scratch.room(chunk_elements(a.samples, a.elements)) : x;
  in_chunks(a.samples, a.elements, [&](std::size_t at, std::size_t samples) {
    const std::size_t first = at * a.elements, count = samples * a.elements;
    scratch.load(a.x + first, x, count);
    if (a.accumulate) scratch.load(a.y + first, y, count);
    const RandomStream stream{a.stream.key, a.stream.high + at};
    f32_kernels().dropout(s, {stream, a.probability, samples, a.elements, x, y, a.accumulate});
    scratch.store(y, a.y + first, count);
  });
}

template <class T>
void HalfKernels<T>::embedding_backward(Stream& s, const EmbeddingBackward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const std::size_t table = a.vocabulary * a.width;
  const float* dy = scratch.widened(a.dy, a.rows * a.width);
  float* dweight = scratch.target(a.dweight, table, a.accumulate);  // sums in f32, because an id may occur often
  f32_kernels().embedding_backward(s, {a.ids, dy, dweight, a.rows, a.vocabulary, a.width, a.accumulate});
  scratch.store(dweight, a.dweight, table);
}

template <class T>
void HalfKernels<T>::linear_forward(Stream& s, const LinearForward<T>& a) {
  if (has_product(a.shape)) {
    product_forward(s, a);
    if (a.activated != nullptr) activation_forward(s, kernels::activation_after(a));
    return;
  }
  F32Scratch<T> scratch(all_, memory_, s);
  const LinearShape& shape = a.shape;
  const std::size_t width = std::max(shape.in, shape.out);
  const float* weight = scratch.widened(a.weight, shape.in * shape.out);
  const float* bias = scratch.widened(a.bias, shape.out);
  const std::size_t most = chunk_rows(shape.rows, width);
  const std::size_t stride = row_stride(a);
  float* x = scratch.room(most * shape.in);
  float* y = scratch.room(most * stride);
  in_chunks(shape.rows, width, [&](std::size_t at, std::size_t rows) {
    scratch.load(a.x + at * shape.in, x, rows * shape.in);
    LinearForward<float> part{.shape = {rows, shape.in, shape.out, shape.layout}};
    part.x = x, part.weight = weight, part.bias = bias, part.y = y, part.y_stride = stride;
    f32_kernels().linear_forward(s, part);
    scratch.store(y, a.y + at * stride, rows * stride);
  });
  if (a.activated != nullptr) activation_forward(s, kernels::activation_after(a));
}

namespace {

template <class T>
void linear_dx(KernelTable<float>& f32, F32Scratch<T>& scratch, Stream& s, const LinearBackward<T>& a) {
  const LinearShape& shape = a.shape;
  const std::size_t width = std::max(shape.in, shape.out);
  const std::size_t most = chunk_rows(shape.rows, width);
  const std::size_t stride = row_stride(a);
  const float* weight = scratch.widened(a.weight, shape.in * shape.out);
  float* dy = scratch.room(most * stride);
  float* dx = scratch.room(most * shape.in);
  in_chunks(shape.rows, width, [&](std::size_t at, std::size_t rows) {
    scratch.load(a.dy + at * stride, dy, rows * stride);
    if (a.accumulate_dx) scratch.load(a.dx + at * shape.in, dx, rows * shape.in);
    LinearBackward<float> part{.shape = {rows, shape.in, shape.out, shape.layout}};
    part.weight = weight, part.dy = dy, part.dx = dx, part.accumulate_dx = a.accumulate_dx, part.dy_stride = stride;
    f32.linear_backward(s, part);
    scratch.store(dx, a.dx + at * shape.in, rows * shape.in);
  });
}

/// Keeps the sums over chunks of rows in f32 until the end.
template <class T>
void linear_dweight(KernelTable<float>& f32, F32Scratch<T>& scratch, Stream& s, const LinearBackward<T>& a) {
  const LinearShape& shape = a.shape;
  const std::size_t width = std::max(shape.in, shape.out), weights = shape.in * shape.out;
  const std::size_t most = chunk_rows(shape.rows, width);
  float* dweight = scratch.target(a.dweight, weights, a.accumulate_dweight);
  float* dbias = scratch.target(a.dbias, shape.out, a.accumulate_dbias);
  float* x = scratch.room_for(a.dweight == nullptr ? nullptr : a.x, most * shape.in);
  const std::size_t stride = row_stride(a);
  float* dy = scratch.room(most * stride);
  const auto chunk = [&](std::size_t at, std::size_t rows) {
    if (x != nullptr) scratch.load(a.x + at * shape.in, x, rows * shape.in);
    scratch.load(shifted(a.dy, at * stride), dy, rows * stride);
    LinearBackward<float> part{.shape = {rows, shape.in, shape.out, shape.layout}};
    part.x = x, part.dy = dy, part.dweight = dweight, part.dbias = dbias, part.dy_stride = stride;
    part.accumulate_dweight = a.accumulate_dweight || at > 0;
    part.accumulate_dbias = a.accumulate_dbias || at > 0;
    f32.linear_backward(s, part);
  };
  if (shape.rows == 0) chunk(0, 0);  // an empty sum is still written
  in_chunks(shape.rows, width, chunk);
  scratch.store(dweight, a.dweight, weights);
  scratch.store(dbias, a.dbias, shape.out);
}

}  // namespace

template <class T>
void HalfKernels<T>::linear_backward(Stream& s, const LinearBackward<T>& args) {
  LinearBackward<T> a = args;
  const bool multiplies = has_product(a.shape);
  if (multiplies) a.dweight = a.dx = nullptr;  // only dbias is left
  // Sequential, so that the two f32 forms of the weight never exist at once.
  if (a.dweight != nullptr || a.dbias != nullptr) {
    F32Scratch<T> scratch(all_, memory_, s);
    linear_dweight(f32_kernels(), scratch, s, a);
  }
  if (a.dx != nullptr) {
    F32Scratch<T> scratch(all_, memory_, s);
    linear_dx(f32_kernels(), scratch, s, a);
  }
  if (multiplies) product_backward(s, args);
}

template <class T>
void HalfKernels<T>::sgd_step(Stream&, const SgdStep<T>&) {
  throw Unsupported("sgd: no kernel for " + std::string(name_of(dtype_of<T>)) +
                    "; half-precision parameters need f32 master weights");
}
template <class T>
void HalfKernels<T>::adam_step(Stream&, const AdamStep<T>&) {
  throw Unsupported("adam: no kernel for " + std::string(name_of(dtype_of<T>)) +
                    "; half-precision parameters need f32 master weights");
}

}  // namespace tessera::nn

#include "tessera/nn/kernels/half/half_rows-inl.h"

namespace tessera::nn {
template class HalfKernels<f16>;
template class HalfKernels<bf16>;
}  // namespace tessera::nn
