// Models with adapters under the engine, with dense or NF4 linear weights.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/lora.h"
#include "tessera/nn/nf4.h"
#include "tests/harness/training.h"

namespace tessera::fsdp::adapters {

using harness::TrainingSpec;

inline constexpr int kSlots = 2;  // optimizer states of AdamW

inline std::unique_ptr<nn::CausalModel> adapted(nn::Context& context, const nn::ModelConfig& config) {
  auto model = nn::make_model(context, config);
  nn::add_lora(*model, {.rank = 4, .alpha = 8, .targets = nn::default_lora_targets(config)});
  return model;
}

inline TrainingSpec spec_for(const std::string& strategy, int ranks, const char* model = "gpt-nano") {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 2 * ranks;
  spec.model = nn::preset(model);
  spec.model.layers = 3;
  spec.engine = harness::engine_for(strategy);
  if (spec.engine.strategy.two_axes)
    spec.engine.mesh = parse_mesh(ranks % 2 == 0 ? "2x" + std::to_string(ranks / 2) : "1x" + std::to_string(ranks));
  spec.engine.clip_norm = 0.5;
  spec.make_model = [config = spec.model](nn::Context& context) { return adapted(context, config); };
  return spec;
}

/// The same spec with linear weights in NF4, quantized from the initial values of the dense model.
inline TrainingSpec quantized(TrainingSpec spec) {
  spec.make_model = [config = spec.model](nn::Context& context) {
    auto model = nn::make_model(context, config);
    nn::quantize_nf4(*model);
    nn::add_lora(*model, {.rank = 4, .alpha = 8, .targets = nn::default_lora_targets(config)});
    return model;
  };
  spec.before_training = [config = spec.model](Engine& engine, comm::Communicator&) {
    nn::Context context;
    std::map<std::string, std::shared_ptr<nn::Parameter>> dense;
    const auto model = nn::make_model(context, config);
    for (const auto& parameter : model->parameters()) dense[parameter->name()] = parameter;
    engine.state().load(
        [&](const nn::Parameter& parameter, nn::ElementRange range, float* out) {
          const nn::Parameter& from = *dense.at(parameter.name());
          std::vector<float> values(static_cast<std::size_t>(from.count()));
          nn::fill_initial(from.init(), from.name(), 0, {0, from.count()}, values.data());
          std::vector<std::byte> bytes(static_cast<std::size_t>(parameter.count()));
          nn::encode_nf4(values, bytes.data());
          for (std::int64_t i = range.begin; i < range.end; ++i)
            out[i - range.begin] = std::to_integer<std::uint8_t>(bytes[static_cast<std::size_t>(i)]);
        },
        [](const nn::Parameter& parameter) { return parameter.dtype() == base::DType::u8; });
  };
  return spec;
}

}  // namespace tessera::fsdp::adapters
