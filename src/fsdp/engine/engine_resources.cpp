#include "tessera/fsdp/engine/engine_resources.h"

#include <algorithm>

namespace tessera::fsdp {

EngineResources::EngineResources(Runtime& the_runtime, comm::Communicator& world, const EngineOptions& options)
    : runtime(the_runtime),
      mesh(world, *options.mesh),
      gather_stream(runtime.make_stream()),
      reduce_stream(runtime.make_stream()),
      poison_stream(options.poison ? runtime.make_stream() : nullptr),
      parameters(make_pool(MemoryCategory::unsharded_parameter, Transfer::gathered)),
      gradients(make_pool(MemoryCategory::unsharded_gradient, Transfer::reduced)),
      buffers(make_pool(MemoryCategory::communication)),
      trace(world.rank(), &runtime.device_runtime()),
      copier(runtime.device_runtime()),
      offload(options.cpu_offload ? std::make_unique<CpuOffload>(runtime, copier, options.poison) : nullptr),
      offload_chunk_elements(options.offload_chunk_elements),
      reduce_dtype(options.reduce_dtype) {}

LeasePool EngineResources::make_pool(MemoryCategory use, Transfer transfer) {
  LeasePool::Poison poison;
  if (poison_stream)
    poison = [this](const Event& released, void* data, std::size_t bytes) {
      // All ones is NaN in every float type: computing with a released buffer yields NaN, not stale values.
      poison_stream->wait(released);
      runtime.device_runtime().fill(*poison_stream, data, 0xFF, bytes);
      return poison_stream->record();
    };
  const auto allocate_untracked = [this, transfer](std::size_t bytes) {
    return allocate(bytes, std::nullopt, transfer);
  };
  return {runtime.memory_tracker(), use, allocate_untracked, poison};
}

Buffer EngineResources::allocate(std::size_t bytes, std::optional<MemoryCategory> use, Transfer transfer) {
  comm::Communicator& world = mesh.world();
  base::DeviceRuntime& on_device = runtime.device_runtime();
  if (on_device.host_accessible()) return world.allocate(bytes, comm::MemoryKind::host, use);
  const std::vector<comm::MemoryKind>& kinds = world.capabilities().memory;
  if (std::find(kinds.begin(), kinds.end(), comm::MemoryKind::device) != kinds.end())
    return allocate_on_device(bytes, use, transfer);
  MemoryTracker& memory_tracker = runtime.memory_tracker();
  void* data = on_device.allocate(bytes);
  if (use) memory_tracker.add(*use, bytes);
  return {data, bytes, [&on_device, &memory_tracker, use](void* p, std::size_t n) {
            on_device.free(p, n);
            if (use) memory_tracker.remove(*use, n);
          }};
}

Buffer EngineResources::allocate_on_device(std::size_t bytes, std::optional<MemoryCategory> use, Transfer transfer) {
  constexpr comm::MemoryKind kDevice = comm::MemoryKind::device;
  const AxisCommunicators* const axis = mesh.innermost();
  if (axis == nullptr || transfer == Transfer::none) return mesh.world().allocate(bytes, kDevice, use);
  comm::Communicator& user = transfer == Transfer::gathered ? *axis->gather : *axis->reduce;
  return user.allocate_symmetric(bytes, kDevice, use);
}

void EngineResources::wait_for_device() {
  compute().synchronize();
  if (poison_stream) poison_stream->synchronize();
}

void EngineResources::join_offload() {
  if (offload == nullptr) return;
  compute().wait(offload->up().record());
  compute().wait(offload->down().record());
}

using comm::OpKind;

void EngineCollectives::create(const CollectiveRegistry& registry, const Strategy& strategy) {
  for (Binding& binding : bindings_) {
    binding.name = strategy.*binding.name_in;
    binding.plugin = registry.make(binding.collective, binding.name);
  }
  const CollectiveCapabilities gathers = all_gather().capabilities();
  exact_gathers_ = gathers.exact;
  gathers_quantized_ = gathers.gathers_quantized();
}

void EngineCollectives::prepare(Runtime& runtime, LeasePool& buffers,
                                const std::function<std::vector<TransferSpec>(OpKind)>& transfers) {
  for (const Binding& binding : bindings_) {
    const std::vector<TransferSpec> all = transfers(binding.collective);
    binding.plugin->prepare({binding.collective, runtime, buffers, all});
  }
}

std::vector<CollectivePlugin::State> EngineCollectives::state() {
  std::vector<CollectivePlugin::State> all;
  for (const Binding& binding : bindings_)
    for (CollectivePlugin::State& state : binding.plugin->state()) {
      state.name = std::string(comm::name_of(binding.collective)) + ":" + binding.name + "/" + state.name;
      all.push_back(std::move(state));
    }
  return all;
}

void EngineCollectives::clear_state(Stream& stream) {
  for (const Binding& binding : bindings_) binding.plugin->clear_state(stream);
}

CollectiveStats EngineCollectives::stats(OpKind collective) const {
  for (const Binding& binding : bindings_) {
    if (binding.collective != collective) continue;
    CollectiveStats stats = binding.plugin->stats();
    if (collective == OpKind::all_gather) {
      stats.raw += quantized_bytes_;
      stats.sent += quantized_bytes_;
    }
    return stats;
  }
  throw InvalidUsage("collective_stats: the engine has no " + std::string(comm::name_of(collective)) +
                     "; pass all_gather, reduce_scatter or all_reduce");
}

}  // namespace tessera::fsdp
