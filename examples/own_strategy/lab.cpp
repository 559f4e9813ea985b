// Research as an external plug-in: a collective and a strategy that training selects by name.
//
//   f16     an all_gather that sends values as f16, in half of f32's bytes
//   hfsdp   parameters sharded within a replica, as under hsdp, so that neighbors all-gather them; gradients and
//           optimizer over all ranks, so that they use no more memory than under fsdp
#include <memory>
#include <vector>

#include "tessera/fsdp/nn_model.h"
#include "tessera/fsdp/plugin.h"

namespace {

using namespace tessera::base;
using namespace tessera::fsdp;
using tessera::comm::OpKind;

class F16AllGather final : public CollectivePlugin {
 public:
  CollectiveCapabilities capabilities() const override {
    return {.exact = false, .linear = false, .dtypes = {DType::f32, DType::f16, DType::bf16}};
  }

  void prepare(const CollectiveSetup& setup) override {
    context_ = &nn_context(setup.runtime);
    buffers_ = &setup.buffers;
  }

  WorkChain run(const CollectiveCall& call) override {
    std::vector<std::shared_ptr<Flight>> flights;
    WorkChain works;  // destroyed before the flights, whose memory is in use until then
    for (const FlatTransfer& transfer : call.transfers) {
      const bool half_already = size_of(transfer.in.dtype) == 2;
      const std::uint64_t raw = plain_bytes(OpKind::all_gather, transfer, call.channel.size());
      stats_.raw += raw;
      stats_.sent += half_already ? raw : raw / 2;
      if (half_already) {
        works.add(start_plain(OpKind::all_gather, call, transfer));
      } else {
        flights.push_back(send(call, transfer, works));
      }
    }
    works.then([this, flights](Stream& stream) {
      for (const auto& flight : flights) {
        const auto& out = flight->out;
        context_->device_kernels().convert(stream, {flight->wire.data(), DType::f16, out.data, out.dtype, out.count});
        flight->wire.release(stream.record());
      }
      return WorkChain();
    });
    return works;
  }

 private:
  struct Flight {
    Lease wire;  // what all ranks sent, in rank order
    tessera::comm::View out;
  };

  std::shared_ptr<Flight> send(const CollectiveCall& call, const FlatTransfer& transfer, WorkChain& works) {
    Stream& stream = *call.options.after;
    const auto& [in, out, flat] = transfer;
    auto flight = std::make_shared<Flight>(
        Flight{buffers_->acquire(out.count * size_of(DType::f16), std::string(call.options.label), stream), out});
    void* const wire = flight->wire.data();
    void* const own = static_cast<f16*>(wire) + in.count * static_cast<std::size_t>(call.channel.rank());
    context_->device_kernels().convert(stream, {in.data, in.dtype, own, DType::f16, in.count});
    works.add(call.channel.all_gather({own, in.count, DType::f16, in.device}, {wire, out.count, DType::f16, out.device},
                                      call.options));
    return flight;
  }

  tessera::nn::Context* context_ = nullptr;
  LeasePool* buffers_ = nullptr;
};

CollectiveCost half_cost(const CollectiveSize& size) {
  const auto ranks = static_cast<std::uint64_t>(size.ranks);
  return {.calls = 1, .bytes = (ranks - 1) * (size.elements / ranks) * size_of(DType::f16)};
}

PluginExports exports() {
  const Axes shard = {kShardAxis}, all = {kReplicateAxis, kShardAxis};
  return {
      .collectives = {{OpKind::all_gather, "f16", [] { return std::make_unique<F16AllGather>(); }, half_cost}},
      .strategies = {{.name = "hfsdp",
                      .param_at_rest = shard,
                      .param_after_forward = shard,
                      .gradient = all,
                      .optimizer = all,
                      .two_axes = true}},
  };
}

}  // namespace

TESSERA_FSDP_PLUGIN(exports)
