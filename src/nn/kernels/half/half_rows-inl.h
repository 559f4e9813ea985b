// The functions of HalfKernels that combine the elements of a row: norms, losses, rotations, attention. Included
// once, by half_kernels.cpp.
#pragma once

#include <algorithm>
#include <functional>

#include "tessera/nn/kernels/half/half_kernels.h"

namespace tessera::nn {

template <class T>
F32Views<T>::F32Views(F32Scratch<std::remove_const_t<T>>& scratch, std::initializer_list<Part> parts)
    : scratch_(scratch) {
  for (const Part& part : parts) {
    const Extents& e = part.extents;
    if (e.elements() == 0) continue;
    const kernels::HeadsView<T>& v = part.view;
    const std::size_t count =
        (e.batch - 1) * v.batch_stride + (e.positions - 1) * v.position_stride + (e.heads - 1) * v.head_stride + e.dim;
    regions_.push_back({v.data, count, e.elements(), part.load});
  }
  std::sort(regions_.begin(), regions_.end(),
            [](const Region& a, const Region& b) { return std::less<>()(a.begin, b.begin); });
  std::vector<Region> merged;
  for (const Region& region : regions_) {
    if (merged.empty() || !std::less<>()(region.begin, merged.back().begin + merged.back().count)) {
      merged.push_back(region);
      continue;
    }
    Region& before = merged.back();
    before.count = std::max(before.count, static_cast<std::size_t>(region.begin - before.begin) + region.count);
    before.covered += region.covered;
    before.load = before.load || region.load;
  }
  regions_ = std::move(merged);
  for (Region& region : regions_) {
    region.f32 = scratch_.room(region.count);
    // Elements between the views are copied there and back unchanged.
    if (region.load || region.covered < region.count) scratch_.load(region.begin, region.f32, region.count);
  }
}

template <class T>
kernels::HeadsView<std::conditional_t<std::is_const_v<T>, const float, float>> F32Views<T>::of(
    const kernels::HeadsView<T>& view) const {
  for (const Region& region : regions_) {
    const bool inside =
        !std::less<>()(view.data, region.begin) && std::less<>()(view.data, region.begin + region.count);
    if (inside)
      return {region.f32 + (view.data - region.begin), view.batch_stride, view.position_stride, view.head_stride};
  }
  return {nullptr, view.batch_stride, view.position_stride, view.head_stride};  // a view without elements
}

template <class T>
void F32Views<T>::store() requires(!std::is_const_v<T>) {
  if constexpr (!std::is_const_v<T>)  // clang 14 instantiates the body for const too
    for (const Region& region : regions_) scratch_.store(region.f32, region.begin, region.count);
}

template <class T>
void HalfKernels<T>::norm_forward(Stream& s, const NormForward<T>& args) {
  const NormForward<T> a = this->add_first(s, args);
  F32Scratch<T> scratch(all_, memory_, s);
  const float* weight = scratch.widened(a.weight, a.width);
  const float* bias = scratch.widened(a.bias, a.width);
  float* x = scratch.room(chunk_elements(a.rows, a.width));
  float* y = scratch.room(chunk_elements(a.rows, a.width));
  in_chunks(a.rows, a.width, [&](std::size_t at, std::size_t rows) {
    scratch.load(a.x + at * a.width, x, rows * a.width);
    f32_kernels().norm_forward(s, {.rows = rows,
                                   .width = a.width,
                                   .x = x,
                                   .weight = weight,
                                   .bias = bias,
                                   .eps = a.eps,
                                   .y = y,
                                   .mean = shifted(a.mean, at),
                                   .rstd = shifted(a.rstd, at),
                                   .norm = a.norm});
    scratch.store(y, a.y + at * a.width, rows * a.width);
  });
}

template <class T>
void HalfKernels<T>::norm_backward(Stream& s, const NormBackward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const std::size_t count = a.rows * a.width;
  NormBackward<float> args{.rows = a.rows, .width = a.width, .norm = a.norm};
  args.x = scratch.widened(a.x, count);
  args.weight = scratch.widened(a.weight, a.width);
  args.mean = a.mean, args.rstd = a.rstd;
  args.dy = scratch.widened(a.dy, count);
  args.dx = scratch.target(a.dx, count, a.accumulate_dx);
  args.dweight = scratch.target(a.dweight, a.width, a.accumulate_dweight);
  args.dbias = scratch.target(a.dbias, a.width, a.accumulate_dbias);
  args.accumulate_dx = a.accumulate_dx;
  args.accumulate_dweight = a.accumulate_dweight;
  args.accumulate_dbias = a.accumulate_dbias;
  f32_kernels().norm_backward(s, args);
  scratch.store(args.dx, a.dx, count);
  scratch.store(args.dweight, a.dweight, a.width);
  scratch.store(args.dbias, a.dbias, a.width);
}

template <class T>
void HalfKernels<T>::cross_entropy_forward(Stream& s, const MeanCrossEntropy<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const CrossEntropyForward<T>& r = a.rows;
  const float* logits = scratch.widened(r.logits, r.rows * row_stride(r));
  f32_kernels().cross_entropy_forward(
      s, {{logits, r.targets, r.rows, r.vocabulary, r.ignore_index, r.row_max, r.row_sum, r.stride}, a.loss, a.valid});
}

template <class T>
void HalfKernels<T>::cross_entropy_backward(Stream& s, const MeanCrossEntropyBackward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const CrossEntropyBackward<T>& r = a.rows;
  const std::size_t width = row_stride(r);
  float* logits = scratch.room(chunk_elements(r.rows, width));
  float* dlogits = r.accumulate ? scratch.room(chunk_elements(r.rows, width)) : logits;
  in_chunks(r.rows, width, [&](std::size_t at, std::size_t rows) {
    scratch.load(r.logits + at * width, logits, rows * width);
    if (r.accumulate) scratch.load(r.dlogits + at * width, dlogits, rows * width);
    f32_kernels().cross_entropy_backward(s, {{logits, r.targets + at, rows, r.vocabulary, r.ignore_index,
                                              r.row_max + at, r.row_sum + at, r.scale, dlogits, r.accumulate, r.stride},
                                             a.upstream,
                                             a.valid});
    scratch.store(dlogits, r.dlogits + at * width, rows * width);
  });
}

template <class T>
void HalfKernels<T>::rope(Stream& s, const RopeArgs<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const typename F32Views<const T>::Extents e{a.batch, a.positions, a.heads, a.dim};
  const F32Views<const T> in(scratch, {{a.in, e}});
  F32Views<T> out(scratch, {{a.out, {a.batch, a.positions, a.heads, a.dim}, a.accumulate}});
  f32_kernels().rope(
      s, {a.batch, a.positions, a.heads, a.dim, a.cosine, a.sine, in.of(a.in), out.of(a.out), a.inverse, a.accumulate});
  out.store();
}

template <class T>
std::size_t HalfKernels<T>::attention_forward_scratch(const AttentionShape& shape) const {
  return f32_kernels().attention_forward_scratch(shape);
}
template <class T>
std::size_t HalfKernels<T>::attention_backward_scratch(const AttentionShape& shape) const {
  return f32_kernels().attention_backward_scratch(shape);
}

template <class T>
void HalfKernels<T>::attention_forward(Stream& s, const AttentionForward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const AttentionShape& shape = a.shape;
  const typename F32Views<const T>::Extents queries{shape.batch, shape.positions, shape.heads, shape.dim},
      keys{shape.batch, shape.positions, shape.kv_heads, shape.dim};
  const F32Views<const T> in(scratch, {{a.q, queries}, {a.k, keys}, {a.v, keys}});
  F32Views<T> out(scratch, {{a.out, {shape.batch, shape.positions, shape.heads, shape.dim}, false}});
  f32_kernels().attention_forward(
      s, {shape, in.of(a.q), in.of(a.k), in.of(a.v), out.of(a.out), a.log_sum_exp, a.scratch, a.dropout});
  out.store();
}

template <class T>
void HalfKernels<T>::attention_backward(Stream& s, const AttentionBackward<T>& a) {
  F32Scratch<T> scratch(all_, memory_, s);
  const AttentionShape& shape = a.shape;
  const typename F32Views<const T>::Extents queries{shape.batch, shape.positions, shape.heads, shape.dim},
      keys{shape.batch, shape.positions, shape.kv_heads, shape.dim};
  const typename F32Views<T>::Extents dqueries{shape.batch, shape.positions, shape.heads, shape.dim},
      dkeys{shape.batch, shape.positions, shape.kv_heads, shape.dim};
  const F32Views<const T> in(scratch, {{a.q, queries}, {a.k, keys}, {a.v, keys}, {a.out, queries}, {a.dout, queries}});
  F32Views<T> out(scratch,
                  {{a.dq, dqueries, a.accumulate_dq}, {a.dk, dkeys, a.accumulate_dk}, {a.dv, dkeys, a.accumulate_dv}});
  AttentionBackward<float> args{shape, in.of(a.q), in.of(a.k), in.of(a.v), in.of(a.out), in.of(a.dout)};
  args.log_sum_exp = a.log_sum_exp;
  args.dq = out.of(a.dq), args.dk = out.of(a.dk), args.dv = out.of(a.dv);
  args.accumulate_dq = a.accumulate_dq, args.accumulate_dk = a.accumulate_dk, args.accumulate_dv = a.accumulate_dv;
  args.scratch = a.scratch, args.dropout = a.dropout;
  f32_kernels().attention_backward(s, args);
  out.store();
}

}  // namespace tessera::nn
