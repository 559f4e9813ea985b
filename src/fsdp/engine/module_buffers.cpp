#include "tessera/fsdp/engine/module_buffers.h"

#include "tessera/comm/traffic.h"
#include "tessera/fsdp/engine/engine_resources.h"

namespace tessera::fsdp {
namespace {

std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

ModuleBuffers::ModuleBuffers(const Module& model, EngineResources& resources)
    : resources_(resources), buffers_(model.buffers()) {
  std::size_t bytes = 0;
  for (const auto& buffer : buffers_) bytes += aligned(buffer->bytes());
  if (bytes == 0) return;
  memory_ = resources_.allocate(bytes, MemoryCategory::other);
  resources_.zero(resources_.compute(), memory_.data(), bytes);
  std::size_t offset = 0;
  for (const auto& buffer : buffers_) {
    buffer->bind(memory_.bytes_at(offset));
    offset += aligned(buffer->bytes());
  }
  comm::Communicator& world = resources_.mesh.world();
  if (world.size() > 1) channel_ = world.split(0, world.rank());
}

ModuleBuffers::~ModuleBuffers() {
  for (const auto& buffer : buffers_) buffer->unbind("its engine is gone");
}

void ModuleBuffers::initialize(std::uint64_t seed) {
  for (const auto& buffer : buffers_) buffer->fill_initial(seed, {0, buffer->count()}, buffer->dtype(), buffer->data());
}

/// As bytes, whatever the dtypes.
comm::View ModuleBuffers::view() { return {memory_.data(), memory_.bytes(), DType::u8, resources_.device()}; }

void ModuleBuffers::start(comm::Work work) {
  last_ = std::move(work);
  last_.wait_on(resources_.compute());
}

void ModuleBuffers::broadcast(int from) {
  if (channel_ == nullptr) return;
  start(channel_->broadcast(view(), view(), from, {.after = &resources_.compute(), .label = "buffers"}));
}

void ModuleBuffers::synchronize(BufferSync sync) {
  if (sync == BufferSync::first_rank) return broadcast(0);
  if (sync == BufferSync::own || channel_ == nullptr) return;
  const comm::View values{memory_.data(), memory_.bytes() / sizeof(float), DType::f32, resources_.device()};
  start(channel_->all_reduce(values, values, comm::ReduceOp::max(),
                             {.after = &resources_.compute(), .label = "buffers"}));
}

void ModuleBuffers::load(const std::function<void(const ModuleBuffer&, void* out)>& fill,
                         const std::function<bool(const ModuleBuffer&)>& wanted) {
  resources_.compute().synchronize();  // the host may write over what the stream's work reads
  for (const auto& buffer : buffers_)
    if (!wanted || wanted(*buffer))
      resources_.runtime.upload(buffer->data(), buffer->bytes(), [&](void* out) { fill(*buffer, out); });
}

std::uint64_t ModuleBuffers::formula_bytes(BufferSync sync) const {
  if (channel_ == nullptr || sync == BufferSync::own) return 0;
  const bool largest = sync == BufferSync::maximum;
  return comm::direct_bytes_sent(largest ? comm::OpKind::all_reduce : comm::OpKind::broadcast,
                                 largest ? memory_.bytes() / sizeof(float) : memory_.bytes(),
                                 largest ? sizeof(float) : 1, channel_->size(), channel_->rank());
}

comm::TrafficStats::TrafficCount ModuleBuffers::traffic() const {
  if (channel_ == nullptr) return {};
  const comm::TrafficStats all = channel_->traffic();
  const comm::TrafficStats::TrafficCount broadcast = all.of(comm::OpKind::broadcast),
                                         largest = all.of(comm::OpKind::all_reduce);
  return {broadcast.calls + largest.calls, broadcast.bytes_sent + largest.bytes_sent};
}

}  // namespace tessera::fsdp
