// A layer with running statistics, from kernels that every device has, and a model with two such layers.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/nn/host_access.h"
#include "tessera/nn/models/gpt2.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {

struct StatisticsOptions {
  bool feeds_back = false;  ///< the output depends on the statistics; otherwise they are only kept
  bool careless = false;    ///< also counts recomputed forward calls
  std::int64_t counts = 1;  ///< elements of the counter, of which the first is used
};

/// mean = 0.9 mean + 0.1 x[0]; count += 1; y = x; with feeds_back 0.1 mean is subtracted from the first row of y.
class Statistics : public nn::Layer<Statistics> {
 public:
  Statistics(nn::Context& context, std::int64_t width, StatisticsOptions options)
      : Layer(context),
        options_(options),
        mean_(add_buffer("running_mean", {width}, {.init = nn::Init::normal(0.1)})),
        count_(add_buffer("count", {options.counts})),
        batches_(add_buffer("batches", {2}, {.dtype = DType::i64})),
        one_(add_buffer("one", {1}, {.init = nn::Init::ones(), .persistent = false})) {}

  nn::Tensor forward(const nn::Tensor& x) {
    nn::KernelTable<float>& kernels = context().kernels<float>("statistics");
    base::Stream& stream = context().stream();
    nn::Tensor y = nn::Tensor::empty(context(), x.shape(), DType::f32);
    const auto width = static_cast<std::size_t>(mean_.count()), all = static_cast<std::size_t>(x.count());
    float* const mean = mean_.tensor().data<float>();
    const float* const from = x.data<float>();
    kernels.assign(stream, {from, y.data<float>(), all, false});
    if (options_.feeds_back) kernels.scale(stream, {mean, -0.1F, y.data<float>(), width, true});
    if (options_.careless || updates_buffers()) {
      kernels.scale(stream, {mean, 0.9F, mean, width, false});
      kernels.scale(stream, {from, 0.1F, mean, width, true});
      kernels.assign(stream, {one_.tensor().data<float>(), count_.tensor().data<float>(), 1, true});
    }
    if (nn::Tape* tape = nn::recording({x}, y))
      tape->record("statistics", y, [dx = x.gradient(), dy = y.gradient()] { dx->accumulate(dy->value()); });
    return y;
  }

 private:
  const StatisticsOptions options_;
  nn::ModuleBuffer &mean_, &count_, &batches_, &one_;
};

class StatisticsModel : public nn::CausalModel {
 public:
  StatisticsModel(nn::Context& context, const nn::ModelConfig& config, StatisticsOptions options)
      : CausalModel(context, config),
        wte_(add<nn::Embedding>("wte", nn::EmbeddingOptions{config.vocabulary, config.width})),
        first_(add<nn::Gpt2Block>("h.0", config)),
        inner_(add<Statistics>("inner", config.width, options)),
        second_(add<nn::Gpt2Block>("h.1", config)),
        last_(add<Statistics>("last", config.width, options)),
        lm_head_(add<nn::LmHead>("lm_head", wte_, true, 0.02)) {}

 private:
  nn::Tensor hidden(const nn::Tensor& tokens) override { return last_(second_(inner_(first_(wte_(tokens))))); }
  nn::Tensor logits(const nn::Tensor& x) override { return lm_head_(x); }

  nn::Embedding& wte_;
  nn::Gpt2Block& first_;
  Statistics& inner_;
  nn::Gpt2Block& second_;
  Statistics& last_;
  nn::LmHead& lm_head_;
};

inline harness::TrainingSpec statistics_spec(const std::string& strategy, int ranks, StatisticsOptions options = {}) {
  harness::TrainingSpec spec;
  spec.ranks = ranks;
  spec.steps = 4;
  spec.engine = harness::engine_for(strategy);
  spec.make_model = [config = spec.model, options](nn::Context& context) {
    return std::make_unique<StatisticsModel>(context, config, options);
  };
  return spec;
}

/// Bytes of each buffer, by name.
using BufferBytes = std::map<std::string, std::vector<std::byte>>;

inline BufferBytes buffers_of(Engine& engine) {
  BufferBytes bytes;
  for (const auto& buffer : engine.state().buffers())
    nn::download(engine.model().context(), buffer->tensor().raw(), buffer->tensor().bytes(), [&](const void* from) {
      const auto* const first = static_cast<const std::byte*>(from);
      bytes[buffer->name()].assign(first, first + buffer->tensor().bytes());
    });
  return bytes;
}

inline std::vector<float> floats(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(values.data()));
  return values;
}

struct StatisticsRecord {
  harness::TrainingRecord training;
  std::vector<BufferBytes> buffers;  ///< by rank, after the last step
  std::vector<EngineTraffic> traffic;
  std::vector<std::uint64_t> formula;
};

/// Trains and returns the buffers of every rank after the last step.
inline StatisticsRecord train_statistics(harness::TrainingSpec spec) {
  StatisticsRecord record;
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

}  // namespace tessera::fsdp
