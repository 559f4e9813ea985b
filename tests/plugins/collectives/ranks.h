// A collective plug-in with ranks as threads, without an engine.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "tessera/comm/init.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/nn_model.h"

namespace tessera::collectives {

using comm::OpKind;
using comm::ReduceOp;
using fsdp::CollectivePlugin;
using fsdp::FlatLayout;

/// The layout of a flat parameter with parameters of these shapes.
inline FlatLayout layout_of(nn::Context& context, const std::vector<nn::Shape>& shapes, int ranks) {
  struct Parameters : nn::Module {
    Parameters(nn::Context& context, const std::vector<nn::Shape>& shapes) : nn::Module(context) {
      for (std::size_t i = 0; i < shapes.size(); ++i)
        add_parameter("p" + std::to_string(i), shapes[i], nn::Init::zeros());
    }
  };
  Parameters parameters(context, shapes);
  return fsdp::make_layouts(fsdp::NnModel(parameters).root().parameters(), ranks).at(0);
}

inline std::vector<float> normals(const std::string& name, std::size_t count) {
  std::vector<float> values(count);
  nn::fill_normal({name, 0, 0, count}, 0.0F, 1.0F, values.data());
  return values;
}

struct World {
  int ranks = 2;
  std::string backend = "shm";
  bool lazy = false;
};

/// A rank with a plug-in that runs `collective` for one flat parameter.
class Bench {
 public:
  Bench(comm::Communicator& channel, const World& world, OpKind collective, const std::vector<nn::Shape>& shapes,
        std::unique_ptr<CollectivePlugin> plugin)
      : channel_(channel),
        collective_(collective),
        context_({.threads = 1,
                  .memory_tracker = channel.memory_tracker(),
                  .memory = {},
                  .make_stream = world.lazy ? base::make_lazy_stream : nullptr,
                  .device = {},
                  .runtime = nullptr}),
        module_(context_),
        model_(module_),
        start_(base::make_lazy_stream()),  // beside a compute stream that is eager or lazy
        buffers_(
            context_.memory_tracker(), base::MemoryCategory::communication,
            [&](std::size_t bytes) { return channel.allocate(bytes, comm::MemoryKind::host, std::nullopt); },
            [this](const base::Event& released, void* data, std::size_t bytes) {  // late reads get NaN
              start_->wait(released);
              context_.runtime().fill(*start_, data, 0xFF, bytes);
              return start_->record();
            }),
        copier_(context_.runtime()),
        layout_(layout_of(context_, shapes, channel.size())),
        plugin_(std::move(plugin)) {
    const std::vector<fsdp::TransferSpec> planned = {
        {"unit", &layout_, base::DType::f32, layout_.padded, channel.size()}};
    plugin_->prepare({collective, model_.runtime(), buffers_, planned});
    context_.stream().synchronize();
  }

  std::size_t padded() const { return static_cast<std::size_t>(layout_.padded); }
  const FlatLayout& layout() const { return layout_; }
  CollectivePlugin& plugin() { return *plugin_; }
  comm::Communicator& channel() { return channel_; }
  nn::Context& context() { return context_; }
  std::uint64_t copied() const { return copier_.copied_bytes(); }

  /// Runs the collective on this rank's `in` and returns the result. all_reduce is in place.
  template <class T>
  std::vector<T> run(const std::vector<T>& in, ReduceOp op = ReduceOp::sum()) {
    const auto ranks = static_cast<std::size_t>(channel_.size());
    const T unset(NAN);
    std::vector<T> out(in);
    if (collective_ == OpKind::all_gather) out.assign(in.size() * ranks, unset);
    if (collective_ == OpKind::reduce_scatter) out.assign(in.size() / ranks, unset);
    const bool in_place = collective_ == OpKind::all_reduce;
    const std::unique_ptr<base::Stream, void (*)(base::Stream*)> drained(
        start_.get(), [](base::Stream* stream) { stream->synchronize(); });  // also if the call is refused
    if (in_place) {  // work before the call writes its input late
      out.assign(in.size(), unset);
      start_->run([&] { std::copy(in.begin(), in.end(), out.begin()); });
    }
    const std::vector<fsdp::FlatTransfer> transfers = {
        {comm::view_of(in_place ? out.data() : const_cast<T*>(in.data()), in.size()),
         comm::view_of(out.data(), out.size()), &layout_}};
    fsdp::WorkChain works = plugin_->run({channel_, transfers, op, {.after = start_.get(), .label = "unit"}, copier_});
    works.wait_on(context_.stream());
    context_.stream().synchronize();
    return out;
  }

 private:
  comm::Communicator& channel_;
  const OpKind collective_;
  nn::Context context_;
  nn::Module module_;  // without parameters
  fsdp::NnModel model_;
  const std::unique_ptr<base::Stream> start_;
  fsdp::LeasePool buffers_;
  fsdp::Copier copier_;
  FlatLayout layout_;
  const std::unique_ptr<CollectivePlugin> plugin_;
};

/// Runs body(bench) on every rank; returns the results by rank.
using Results = std::vector<std::vector<float>>;
template <class Factory>
Results on_ranks(const World& world, OpKind collective, const std::vector<nn::Shape>& shapes, const Factory& make,
                 const std::function<std::vector<float>(Bench&)>& body) {
  Results results(static_cast<std::size_t>(world.ranks));
  comm::InitOptions config;
  config.backend = world.backend;
  config.timeout = std::chrono::seconds(60);
  config.algorithms = "all_reduce=direct,all_gather=direct,reduce_scatter=direct";
  comm::run_threads(world.ranks, config, [&](comm::Communicator& channel) {
    Bench bench(channel, world, collective, shapes, make());
    results[static_cast<std::size_t>(channel.rank())] = body(bench);
  });
  return results;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace tessera::collectives
