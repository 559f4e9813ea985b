#include "tools/bench/buffers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tessera/base/error.h"
#include "tools/bench/memory_bound.h"

namespace tessera::tools {
namespace {

using base::CopyDirection;
using comm::MemoryKind;
using comm::OpKind;

bool supports(const comm::Communicator& world, MemoryKind kind) {
  const std::vector<MemoryKind>& kinds = world.capabilities().memory;
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

}  // namespace

BenchMemory::BenchMemory(comm::Communicator& world, base::DeviceRuntime& device, bool communicator_memory)
    : world_(world),
      runtime_(device),
      communicator_memory_(communicator_memory),
      pool_(world.memory_tracker()),
      stream_(device.make_stream()) {
  if (on_host() && !supports(world, MemoryKind::host))
    throw base::InvalidUsage(fmt::format("backend {} supports device memory only; use --device cuda", world.backend()));
}

std::size_t BenchMemory::larger_than_caches() const {
  constexpr std::size_t kEnough = std::size_t{512} << 20;  // ten times the second-level cache of the largest GPU
  const std::size_t all = runtime_.properties().memory_bytes;
  return all == 0 ? kEnough / 8 : std::min(kEnough, all / 64);
}

/// Device memory that is not the communicator's is staged through host memory on backends of the host.
base::Buffer BenchMemory::allocate_there(std::size_t bytes) {
  const MemoryKind kind = on_host() ? MemoryKind::host : MemoryKind::device;
  if (communicator_memory_ && supports(world_, kind))
    return world_.allocate(bytes, kind, base::MemoryCategory::communication);
  return on_host() ? pool_.allocate(bytes, base::MemoryCategory::communication) : allocate_of_device(bytes);
}

base::Buffer BenchMemory::allocate_of_device(std::size_t bytes) {
  return {runtime_.allocate(bytes), bytes,
          [&runtime = runtime_](void* data, std::size_t size) { runtime.free(data, size); }};
}

BenchMemory::Block BenchMemory::allocate(std::size_t bytes) {
  Block block{.memory = allocate_there(bytes), .copy = {}};
  if (!on_host()) block.copy = pool_.allocate(bytes, base::MemoryCategory::other);
  return block;
}

void BenchMemory::copy(Block& block, std::size_t bytes, CopyDirection direction) {
  if (on_host()) return;
  const bool there = direction == CopyDirection::host_to_device;
  base::Buffer &from = there ? block.copy : block.memory, &to = there ? block.memory : block.copy;
  runtime_.copy(*stream_, direction, to.data(), from.data(), bytes);
  stream_->synchronize();
}

void BenchMemory::move(const MemoryTraffic& traffic) {
  // A copy loads and stores each byte once; adding n sources loads n and stores one.
  const std::size_t bytes =
      traffic.copied + (traffic.combined * (static_cast<std::size_t>(traffic.sources) + 1) + 1) / 2;
  if (bytes == 0) return;
  for (base::Buffer* buffer : {&from_, &to_})
    if (!*buffer || buffer->bytes() < bytes) *buffer = allocate_of_device(bytes);
  runtime_.copy(*stream_, CopyDirection::device_to_device, to_.data(), from_.data(), bytes);
  stream_->synchronize();
}

comm::Work BenchCall::start(comm::Communicator& world) const {
  switch (kind) {
    case OpKind::all_reduce:
      return world.all_reduce(in, out, op);
    case OpKind::all_gather:
      return counts.empty() ? world.all_gather(in, out) : world.all_gather_v(in, out, counts);
    case OpKind::reduce_scatter:
      return counts.empty() ? world.reduce_scatter(in, out, op) : world.reduce_scatter_v(in, out, counts, op);
    case OpKind::broadcast:
      return world.broadcast(in, out, root);
    case OpKind::reduce:
      return world.reduce(in, out, op, root);
    case OpKind::gather:
      return counts.empty() ? world.gather(in, out, root) : world.gather_v(in, out, counts, root);
    case OpKind::scatter:
      return counts.empty() ? world.scatter(in, out, root) : world.scatter_v(in, out, counts, root);
    case OpKind::all_to_all:
      return counts.empty() ? world.all_to_all(in, out) : world.all_to_all_v(in, counts, out, out_counts);
    case OpKind::send: {
      const int n = world.size();
      const std::array parts = {comm::P2POp::send(in, (world.rank() + 1) % n),
                                comm::P2POp::recv(out, (world.rank() + n - 1) % n)};
      return world.batch(parts);
    }
    default:
      return world.barrier();
  }
}

void BenchCall::run(comm::Communicator& world) const {
  if (exchange == Exchange::ring) return start(world).wait();
  const bool first = world.rank() < world.size() / 2;
  const int peer = partner_of(world.rank(), world.size());
  if (exchange == Exchange::put || exchange == Exchange::get) return exchange_one_sided(world, peer, first);
  const auto pass = [&](bool sends) { (sends ? world.send(in, peer) : world.recv(out, peer)).wait(); };
  if (exchange == Exchange::ping_pong) {
    for (int i = 0; i < 2 * kRoundTrips; ++i) pass(first == (i % 2 == 0));
  } else if (exchange == Exchange::window) {
    std::array<comm::Work, kWindow> works;
    for (comm::Work& work : works) work = first ? world.send(in, peer) : world.recv(out, peer);
    for (comm::Work& work : works) work.wait();
    const std::size_t answer = std::min<std::size_t>(out.count, 1);
    (first ? world.recv({out.data, answer, out.dtype, out.device}, peer)
           : world.send({out.data, answer, out.dtype, out.device}, peer))
        .wait();
  } else {
    std::vector<comm::P2POp> parts;
    parts.reserve(2 * kWindow);
    for (int i = 0; i < kWindow; ++i)
      parts.insert(parts.end(), {comm::P2POp::recv(out, peer), comm::P2POp::send(in, peer)});
    world.batch(parts).wait();
  }
}

void BenchCall::exchange_one_sided(comm::Communicator& world, int peer, bool first) const {
  const bool puts = exchange == Exchange::put;
  if (!window) {  // others read what is sent, or write what is received
    const comm::View sent{const_cast<void*>(in.data), in.count, in.dtype, in.device};
    window = std::make_shared<comm::Window>(world, puts ? out : sent);
    world.barrier().wait();
  }
  for (int i = 0; i < (puts ? 2 : 1) * kRoundTrips; ++i) {
    if (!puts) {
      if (first) window->get(out, peer, 0).wait();
    } else if (first == (i % 2 == 0)) {
      window->put(in, peer, 0).wait();
      window->signal(peer).wait();
    } else {
      window->wait_signal(peer);
    }
  }
}

std::optional<std::string> BenchCall::try_on(comm::Communicator& world, bool may_refuse) const {
  try {
    run(world);
    return std::string(world.last_algorithm());
  } catch (const base::InvalidUsage&) {
    if (!may_refuse) throw;
  } catch (const base::Unsupported&) {
    if (!may_refuse) throw;
  }
  return std::nullopt;
}

void BenchCall::evict() const {
  tools::evict({static_cast<const std::byte*>(in.data), in.bytes()});
  tools::evict({static_cast<const std::byte*>(out.data), out.bytes()});
}

BenchBuffers::BenchBuffers(BenchMemory& memory, int rank, const BenchData& data, const BenchShape& largest,
                           bool misaligned)
    : memory_(memory),
      data_(data),
      rank_(rank),
      begin_(misaligned ? base::size_of(data.dtype) : 0),
      in_(memory.allocate(begin_ + largest.in_count * base::size_of(data.dtype))),
      out_(memory.allocate(begin_ + largest.out_count * base::size_of(data.dtype))) {}

BenchBuffers::Pointers BenchBuffers::pointers(const BenchShape& shape, bool in_place, Pointers begin) const {
  const auto [in, out] = begin;
  const OpKind kind = data_.op->kind;
  const bool roots = comm::writes_root(kind) || kind == OpKind::scatter;  // only the root has both buffers
  if (!in_place || (roots && rank_ != data_.root)) return begin;
  const std::size_t part = shape.begin(rank_) * base::size_of(data_.dtype);
  if (comm::parts_of_out(kind)) return {out + part, out};
  if (comm::parts_of_in(kind)) return {in, in + part};
  return {out, out};
}

void BenchBuffers::fill(const BenchShape& shape, bool in_place) {
  const Pointers begin = {in_.host() + begin_, out_.host() + begin_}, at = pointers(shape, in_place, begin);
  const std::size_t element = base::size_of(data_.dtype);
  poison(begin.in, shape.in_count * element);
  poison(begin.out, shape.out_count * element);
  if (!comm::reads_root(data_.op->kind) || rank_ == data_.root) fill_bench_input(data_, rank_, at.in, shape.in_count);
  memory_.copy(in_, begin_ + shape.in_count * element, CopyDirection::host_to_device);
  memory_.copy(out_, begin_ + shape.out_count * element, CopyDirection::host_to_device);
}

comm::View BenchBuffers::output(const BenchShape& shape, bool in_place) {
  const std::size_t element = base::size_of(data_.dtype);
  memory_.copy(in_, begin_ + shape.in_count * element, CopyDirection::device_to_host);
  memory_.copy(out_, begin_ + shape.out_count * element, CopyDirection::device_to_host);
  return {pointers(shape, in_place, {in_.host() + begin_, out_.host() + begin_}).out, shape.out_count, data_.dtype, {}};
}

BenchCall BenchBuffers::call(const BenchShape& shape, bool in_place) const {
  const Pointers at = pointers(shape, in_place, {in_.memory.bytes_at(begin_), out_.memory.bytes_at(begin_)});
  return {data_.op->kind,
          {at.in, shape.in_count, data_.dtype, memory_.device()},
          {at.out, shape.out_count, data_.dtype, memory_.device()},
          bench_reduce_op(data_.redop, rank_),
          data_.root,
          data_.op->exchange,
          shape.counts,
          std::vector(shape.counts.size(), shape.part(rank_))};
}

}  // namespace tessera::tools
