// Models that the presets do not have: uneven sizes, module buffers, adapters.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/nn/host_access.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/models/gpt2.h"
#include "tessera/nn/nf4.h"
#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {

/// Sizes that no world size divides: width 36 in 3 heads, 3 blocks, odd vocabulary and context sizes.
inline nn::ModelConfig uneven_model() {
  nn::ModelConfig model = nn::preset("gpt-nano");
  model.name = "uneven";
  model.layers = 3;
  model.width = 36;
  model.heads = model.kv_heads = 3;
  model.head_dim = 12;
  model.hidden = 4 * 36;
  model.vocabulary = 257;
  model.context = 17;
  return model;
}

// --- module buffers

struct BufferModelOptions {
  bool feeds_back = false;            ///< the output depends on the buffers; otherwise they are only kept
  bool counts_recomputation = false;  ///< also counts recomputed forward calls
  std::int64_t counts = 1;            ///< elements of the counter, of which the first is used
};

/// A layer with module buffers, from kernels that every device has:
/// mean = 0.9 mean + 0.1 x[0]; count += 1; y = x; with feeds_back 0.1 mean is subtracted from the first row of y.
class RunningMean : public nn::Layer<RunningMean> {
 public:
  RunningMean(nn::Context& context, std::int64_t width, BufferModelOptions options)
      : Layer(context),
        options_(options),
        mean_(add_buffer("running_mean", {width}, {.init = nn::Init::normal(0.1)})),
        count_(add_buffer("count", {options.counts})),
        batches_(add_buffer("batches", {2}, {.dtype = DType::i64})),
        one_(add_buffer("one", {1}, {.init = nn::Init::ones(), .persistent = false})) {}

  nn::Tensor forward(const nn::Tensor& x) {
    nn::KernelTable<float>& kernels = context().kernels<float>("running_mean");
    base::Stream& stream = context().stream();
    nn::Tensor y = nn::Tensor::empty(context(), x.shape(), DType::f32);
    const auto width = static_cast<std::size_t>(mean_.count()), all = static_cast<std::size_t>(x.count());
    float* const mean = mean_.tensor().data<float>();
    const float* const from = x.data<float>();
    kernels.assign(stream, {from, y.data<float>(), all, false});
    if (options_.feeds_back) kernels.scale(stream, {mean, -0.1F, y.data<float>(), width, true});
    if (options_.counts_recomputation || updates_buffers()) {
      kernels.scale(stream, {mean, 0.9F, mean, width, false});
      kernels.scale(stream, {from, 0.1F, mean, width, true});
      kernels.assign(stream, {one_.tensor().data<float>(), count_.tensor().data<float>(), 1, true});
    }
    if (nn::Tape* tape = nn::recording({x}, y))
      tape->record("running_mean", y, [dx = x.gradient(), dy = y.gradient()] { dx->accumulate(dy->value()); });
    return y;
  }

 private:
  const BufferModelOptions options_;
  nn::ModuleBuffer &mean_, &count_, &batches_, &one_;
};

/// Two blocks, each followed by a RunningMean.
class BufferModel : public nn::CausalModel {
 public:
  BufferModel(nn::Context& context, const nn::ModelConfig& config, BufferModelOptions options)
      : CausalModel(context, config),
        wte_(add<nn::Embedding>("wte", nn::EmbeddingOptions{config.vocabulary, config.width})),
        first_(add<nn::Gpt2Block>("h.0", config)),
        inner_(add<RunningMean>("inner", config.width, options)),
        second_(add<nn::Gpt2Block>("h.1", config)),
        last_(add<RunningMean>("last", config.width, options)),
        lm_head_(add<nn::LmHead>("lm_head", wte_, true, 0.02)) {}

 private:
  nn::Tensor hidden(const nn::Tensor& tokens) override { return last_(second_(inner_(first_(wte_(tokens))))); }
  nn::Tensor logits(const nn::Tensor& x) override { return lm_head_(x); }

  nn::Embedding& wte_;
  nn::Gpt2Block& first_;
  RunningMean& inner_;
  nn::Gpt2Block& second_;
  RunningMean& last_;
  nn::LmHead& lm_head_;
};

inline TrainingSpec buffer_spec(const std::string& strategy, int ranks, BufferModelOptions options = {}) {
  TrainingSpec spec = base_spec(strategy, ranks, {.layers = 2});
  spec.global_batch = 12;
  spec.steps = 4;
  spec.make_model = [config = spec.model, options](nn::Context& context) {
    return std::make_unique<BufferModel>(context, config, options);
  };
  return spec;
}

/// Bytes of each buffer, by name.
using BufferBytes = std::map<std::string, std::vector<std::byte>>;

inline BufferBytes buffers_of(Engine& engine) {
  BufferBytes bytes;
  for (const auto& buffer : engine.state().buffers())
    engine.model().runtime().download(buffer->data(), buffer->bytes(), [&](const void* from) {
      const auto* const first = static_cast<const std::byte*>(from);
      bytes[buffer->name()].assign(first, first + buffer->bytes());
    });
  return bytes;
}

inline std::vector<float> floats(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(values.data()));
  return values;
}

struct BufferRecord {
  harness::TrainingRecord training;
  std::vector<BufferBytes> buffers;  ///< by rank, after the last step
  std::vector<EngineTraffic> traffic;
  std::vector<std::uint64_t> formula;
};

/// Trains and returns the buffers of every rank after the last step.
inline BufferRecord train_buffers(TrainingSpec spec) {
  BufferRecord record;
  std::mutex mutex;
  record.buffers.resize(static_cast<std::size_t>(spec.ranks));
  record.traffic.resize(record.buffers.size());
  record.formula.resize(record.buffers.size());
  const auto after = spec.after_step;
  spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel& model) {
    if (after) after(rank, step, engine, model);
    if (step + 1 != spec.steps) return;
    const BufferBytes bytes = buffers_of(engine);
    const std::lock_guard lock(mutex);
    record.buffers[static_cast<std::size_t>(rank)] = bytes;
    record.traffic[static_cast<std::size_t>(rank)] = engine.stats().traffic();
    record.formula[static_cast<std::size_t>(rank)] = engine.stats().buffer_formula_bytes();
  };
  record.training = harness::train(spec);
  return record;
}

// --- adapters

inline constexpr int kAdamSlots = 2;  // optimizer states of AdamW

inline std::unique_ptr<nn::CausalModel> make_lora_model(nn::Context& context, const nn::ModelConfig& config) {
  auto model = nn::make_model(context, config);
  nn::add_lora(*model, {.rank = 4, .alpha = 8, .targets = nn::default_lora_targets(config)});
  return model;
}

inline TrainingSpec lora_spec(const std::string& strategy, int ranks, const char* model = "gpt-nano") {
  TrainingSpec spec = base_spec(strategy, ranks, {.clip_norm = 0.5});
  spec.model = nn::preset(model);
  spec.model.layers = 3;
  if (spec.engine.strategy.two_axes)
    spec.engine.mesh = parse_mesh(ranks % 2 == 0 ? "2x" + std::to_string(ranks / 2) : "1x" + std::to_string(ranks));
  spec.make_model = [config = spec.model](nn::Context& context) { return make_lora_model(context, config); };
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
        [&](const fsdp::Parameter& parameter, nn::ElementRange range, float* out) {
          const nn::Parameter& from = *dense.at(parameter.name());
          std::vector<float> values(static_cast<std::size_t>(from.count()));
          nn::fill_initial(from.init(), from.name(), 0, {0, from.count()}, values.data());
          std::vector<std::byte> bytes(static_cast<std::size_t>(parameter.count()));
          nn::encode_nf4(values, bytes);
          for (std::int64_t i = range.begin; i < range.end; ++i)
            out[i - range.begin] = std::to_integer<std::uint8_t>(bytes[static_cast<std::size_t>(i)]);
        },
        [](const fsdp::Parameter& parameter) { return parameter.dtype() == base::DType::u8; });
  };
  return spec;
}

}  // namespace tessera::fsdp
