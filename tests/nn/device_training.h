// A small training that runs on any device.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/host_access.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/ops/cast.h"
#include "tessera/nn/optimizer.h"

namespace tessera::nn::test {

inline Tensor counting_ids(Context& context, int later) {
  const Shape shape = {3, 21};
  Tensor ids = Tensor::empty(context, shape, DType::i32);
  upload(context, ids.raw(), ids.bytes(), [&](void* out) {
    for (int i = 0; i < 63; ++i) static_cast<std::int32_t*>(out)[i] = (5 * (i / 21) + i % 21 + later) % 17;
  });
  return ids;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> parameters;
  bool operator==(const Outcome&) const = default;
};

/// A model of f32; "odd": one whose logits have odd rows; "mixed": one of bf16 whose norms and head are f32; "fp8" and
/// "fp8-delayed": one of bf16 with products in 8 bits.
inline std::unique_ptr<CausalModel> model_of(const std::string& name, Context& context) {
  const bool mixed = name == "mixed";
  const bool odd = name == "odd", fp8 = name.starts_with("fp8");
  ModelConfig config = preset(mixed ? "llama-nano" : odd || fp8 ? "gpt-nano" : name);
  if (odd) config.vocabulary = 257;
  config.embedding_dropout = config.residual_dropout = config.attention_dropout = 0.1;
  auto model = make_model(context, config);
  if (!mixed && !fp8) return model;
  model->set_dtype(DType::bf16);
  if (fp8) use_fp8(*model, name == "fp8" ? Fp8Scaling::current : Fp8Scaling::delayed);
  if (fp8) return model;
  for (const char* path :
       {"model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm", "lm_head"})
    model->find(path).set_dtype(DType::f32);
  return model;
}

/// `read`: whether losses and parameters are read.
inline Outcome train(const char* name, Context& context, bool read = true) {
  const auto model = model_of(name, context);
  model->materialize(0);
  Optimizer optimizer(*model, {});
  const Tensor tokens = counting_ids(context, 0), targets = counting_ids(context, 1);
  Outcome outcome;
  for (int step = 1; step <= 3; ++step) {
    context.random().step = static_cast<std::uint64_t>(step);
    Tape tape;
    const TapeScope scope(context, &tape);
    const Tensor loss = model->loss(tokens, targets);
    tape.backward(loss);
    optimizer.step(3e-3);
    if (read) outcome.losses.push_back(loss.item());
  }
  for (const auto& parameter : model->parameters()) {
    if (!read) break;
    const Tensor tensor = ops::cast(parameter->tensor().detached(), DType::f32);
    download(context, tensor.raw(), tensor.bytes(), [&](const void* data) {
      const auto* values = static_cast<const float*>(data);
      outcome.parameters.emplace_back(values, values + tensor.count());
    });
  }
  return outcome;
}

}  // namespace tessera::nn::test
