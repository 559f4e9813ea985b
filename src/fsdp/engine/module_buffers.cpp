#include "tessera/fsdp/engine/module_buffers.h"

#include "tessera/comm/traffic.h"
#include "tessera/fsdp/engine/engine_resources.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {
namespace {

std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

ModuleBuffers::ModuleBuffers(const nn::Module& model, EngineResources& resources)
    : resources_(resources), buffers_(model.buffers()) {
  std::size_t bytes = 0;
  for (const auto& buffer : buffers_) bytes += aligned(buffer->tensor().bytes());
  if (bytes == 0) return;
  memory_ = resources_.allocate(bytes, MemoryCategory::other);
  resources_.zero(resources_.compute(), memory_.data(), bytes);
  std::size_t offset = 0;
  for (const auto& buffer : buffers_) {
    nn::Tensor tensor = buffer->tensor();
    tensor.bind(memory_.bytes_at(offset));
    offset += aligned(tensor.bytes());
  }
  comm::Communicator& world = resources_.mesh.world();
  if (world.size() > 1) channel_ = world.split(0, world.rank());
}

ModuleBuffers::~ModuleBuffers() {
  for (const auto& buffer : buffers_) {
    nn::Tensor tensor = buffer->tensor();
    tensor.unbind("its engine is gone");
  }
}

void ModuleBuffers::initialize(std::uint64_t seed) {
  for (const auto& buffer : buffers_)
    nn::fill_initial(resources_.context, {buffer->init(), buffer->name(), seed, {0, buffer->count()}}, buffer->dtype(),
                     buffer->tensor().raw());
}

/// As bytes, whatever the dtypes.
comm::View ModuleBuffers::view() { return {memory_.data(), memory_.bytes(), DType::u8, resources_.device()}; }

void ModuleBuffers::broadcast(int from) {
  if (channel_ == nullptr) return;
  Stream& stream = resources_.compute();
  broadcast_ = channel_->broadcast(view(), view(), from, {.after = &stream, .label = "buffers"});
  broadcast_.wait_on(stream);
}

void ModuleBuffers::load(const std::function<void(const nn::ModuleBuffer&, void* out)>& fill,
                         const std::function<bool(const nn::ModuleBuffer&)>& wanted) {
  resources_.compute().synchronize();  // the host may write over what the stream's work reads
  for (const auto& buffer : buffers_)
    if (!wanted || wanted(*buffer))
      nn::upload(resources_.context, buffer->tensor().raw(), buffer->tensor().bytes(),
                 [&](void* out) { fill(*buffer, out); });
}

std::uint64_t ModuleBuffers::formula_bytes() const {
  if (channel_ == nullptr) return 0;
  return comm::direct_bytes_sent(comm::OpKind::broadcast, memory_.bytes(), 1, channel_->size(), channel_->rank());
}

comm::TrafficStats::TrafficCount ModuleBuffers::traffic() const {
  return channel_ == nullptr ? comm::TrafficStats::TrafficCount{} : channel_->traffic().of(comm::OpKind::broadcast);
}

}  // namespace tessera::fsdp
