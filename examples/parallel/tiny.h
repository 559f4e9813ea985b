// A tiny language model in pieces, which each program in this folder divides between its ranks in another way. All
// begin with the same numbers and get the same batches, so that their losses and parameters can be compared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/init.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/attention.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tessera/nn/ops/embedding.h"
#include "tessera/nn/ops/linear.h"
#include "tessera/nn/ops/norm.h"
#include "tessera/nn/tape.h"

namespace tiny {

using namespace tessera;
using nn::Tensor;

constexpr std::int64_t kSequences = 8, kPositions = 16;  // of a global batch
constexpr std::int64_t kWidth = 32, kHeads = 4, kHidden = 4 * kWidth, kBlocks = 4, kVocabulary = 64;
constexpr double kRate = 0.5;

/// Products whose bits are the same on every processor.
inline nn::ContextOptions options() { return {.products = nn::Products::own}; }

/// Part `index` of `count` equal parts of a matrix: of its rows (of [out, in]: the outputs), or of its columns.
struct Part {
  std::int64_t index = 0, count = 1;
  bool columns = false;
};

struct Parameter {
  std::string name;
  Tensor value;
  std::int64_t rows = 1, columns = 1;  ///< of the whole matrix
  Part part;                           ///< which `value` has
  std::int64_t count() const { return value.count(); }
  std::span<float> values() const { return {value.data<float>(), static_cast<std::size_t>(count())}; }
  std::span<const float> gradient() const {
    return {value.gradient()->value().data<float>(), static_cast<std::size_t>(count())};
  }
};

/// Writes elements of the whole matrix, or of the part, in the other's place: copy(whole element, part element).
template <class Copy>
void each_element(const Parameter& p, Copy&& copy) {
  const std::int64_t rows = p.part.columns ? p.rows : p.rows / p.part.count;
  const std::int64_t columns = p.part.columns ? p.columns / p.part.count : p.columns;
  const std::int64_t row_0 = p.part.columns ? 0 : p.part.index * rows;
  const std::int64_t column_0 = p.part.columns ? p.part.index * columns : 0;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) copy((row_0 + r) * p.columns + column_0 + c, r * columns + c);
}

/// The parameters of this rank, in the model's order.
class Parameters {
 public:
  /// `with_memory` false: somebody else binds their memory.
  explicit Parameters(nn::Context& context, bool with_memory = true) : context_(context), with_memory_(with_memory) {}

  Tensor add(const std::string& name, std::int64_t rows, std::int64_t columns, Part part = {}) {
    const nn::Shape shape = part.columns ? nn::Shape{rows, columns / part.count}
                            : rows == 1  ? nn::Shape{columns}
                                         : nn::Shape{rows / part.count, columns};
    Tensor value = with_memory_ ? Tensor::empty(context_, shape, base::DType::f32, base::MemoryCategory::parameter)
                                : Tensor::unbound(context_, shape, base::DType::f32, name);
    value.set_requires_grad(true);
    value.gradient()->set_use(base::MemoryCategory::gradient);
    all_.push_back({name, value, rows, columns, part});
    if (with_memory_) initialize(all_.back(), all_.back().values());
    return value;
  }
  /// Ones for norms, which are vectors, else normal numbers that depend on the name alone.
  static void initialize(const Parameter& p, std::span<float> out) {
    std::vector<float> whole(static_cast<std::size_t>(p.rows * p.columns));
    const nn::Init init = p.rows == 1 ? nn::Init::ones() : nn::Init::normal(0.1);
    nn::fill_initial(init, p.name, /*seed=*/1, {0, p.rows * p.columns}, whole.data());
    each_element(p, [&](std::int64_t from, std::int64_t to) { out[to] = whole[from]; });
  }
  /// Subtracts kRate * gradient, and drops the gradients.
  void update() {
    for (Parameter& p : all_) {
      const std::span<const float> gradient = p.gradient();
      for (std::int64_t i = 0; i < p.count(); ++i) p.values()[i] -= static_cast<float>(kRate) * gradient[i];
      p.value.gradient()->clear();
    }
  }
  std::vector<Parameter>& all() { return all_; }

 private:
  nn::Context& context_;
  const bool with_memory_;
  std::vector<Parameter> all_;
};

/// The embedding, if it is of this rank.
inline Tensor add_embedding(Parameters& all) { return all.add("embed", kVocabulary, kWidth); }

/// A block of attention and feed-forward, or with `part` some of its heads and hidden units.
struct Block {
  Block(Parameters& all, int index, Part part = {}) : name("h." + std::to_string(index)) {
    const Part outputs = part, inputs{part.index, part.count, part.count > 1};
    norm_1 = all.add(name + ".norm_1", 1, kWidth);
    q = all.add(name + ".q", kWidth, kWidth, outputs);
    k = all.add(name + ".k", kWidth, kWidth, outputs);
    v = all.add(name + ".v", kWidth, kWidth, outputs);
    o = all.add(name + ".o", kWidth, kWidth, inputs);
    norm_2 = all.add(name + ".norm_2", 1, kWidth);
    up = all.add(name + ".up", kHidden, kWidth, outputs);
    down = all.add(name + ".down", kWidth, kHidden, inputs);
  }
  /// Of the heads that it has.
  Tensor attention(const Tensor& x) const {
    const std::int64_t heads = q.dim(0) / (kWidth / kHeads);
    return nn::ops::linear(nn::ops::attention(nn::ops::linear(x, q), nn::ops::linear(x, k), nn::ops::linear(x, v),
                                              {.heads = heads, .kv_heads = heads}),
                           o);
  }
  Tensor feed_forward(const Tensor& x) const { return nn::ops::linear(nn::ops::relu(nn::ops::linear(x, up)), down); }
  Tensor forward(const Tensor& x) const {
    const Tensor y = x + attention(nn::ops::rms_norm(x, norm_1));
    return y + feed_forward(nn::ops::rms_norm(y, norm_2));
  }
  std::string name;
  Tensor norm_1, q, k, v, o, norm_2, up, down;
};

/// The last norm, the logits and the loss.
struct Head {
  explicit Head(Parameters& all) : norm(all.add("norm", 1, kWidth)), weight(all.add("head", kVocabulary, kWidth)) {}
  Tensor loss(const Tensor& x, const Tensor& targets) const {
    return nn::ops::cross_entropy(nn::ops::linear(nn::ops::rms_norm(x, norm), weight), targets);
  }
  Tensor norm, weight;
};

/// Which part of a global batch.
struct Slice {
  std::int64_t first_sequence = 0, sequences = kSequences, first_position = 0, positions = kPositions;
};

/// Tokens whose successor can be learned, and these successors.
inline std::pair<Tensor, Tensor> batch(nn::Context& context, int step, const Slice& slice) {
  std::vector<int> tokens, targets;
  for (std::int64_t s = slice.first_sequence; s < slice.first_sequence + slice.sequences; ++s)
    for (std::int64_t p = slice.first_position; p < slice.first_position + slice.positions; ++p) {
      const auto token = [&](std::int64_t at) {
        return static_cast<int>((29 * step + 13 * s + (s % 2 == 0 ? 3 : 5) * at) % kVocabulary);
      };
      tokens.push_back(token(p));
      targets.push_back(token(p + 1));
    }
  const nn::Shape shape = {slice.sequences, slice.positions};
  return {Tensor::from(context, tokens, shape), Tensor::from(context, targets, shape)};
}

/// A part of the model with a tape of its own, so that its backward can run when the gradient of its output is there.
class Segment {
 public:
  /// Computes output = function(input) on the tape. Without an input (an embedding) there is no gradient to pass on.
  template <class Function>
  Tensor forward(nn::Context& context, const Tensor& input, Function&& function) {
    input_ = input ? input.detached() : input;
    if (input_) input_.set_requires_grad(true);
    const nn::TapeScope recording(context, &tape_);
    output_ = function(input_);
    return output_.detached();
  }
  /// From the gradient of the output; returns that of the input. A loss needs none.
  Tensor backward(const Tensor& gradient = {}) {
    if (gradient) {
      output_.gradient()->accumulate(gradient);
      tape_.backward_from_gradients();
    } else {
      tape_.backward(output_);
    }
    const Tensor passed_on = input_ ? input_.gradient()->value() : Tensor();
    input_ = output_ = Tensor();
    return passed_on;
  }

 private:
  nn::Tape tape_;
  Tensor input_, output_;
};

}  // namespace tiny
