#include "backends/sim/world.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::sim {
namespace {

/// The state that a world and all its splits share.
struct Simulation {
  VirtualClock& clock;
  Network network;
  std::string aborted;
};

class SimulatedWork final : public WorkState {
 public:
  SimulatedWork(VirtualClock& clock, std::int64_t end) : clock_(clock), end_(end) {}
  bool done() noexcept override { return end_ <= clock_.host_time(); }
  bool wait_until(std::chrono::steady_clock::time_point) override {
    wait();
    return true;
  }
  void wait() override { clock_.host_waits_until(end_); }
  void wait_on(Stream& stream) override { clock_.wait_until(stream, end_); }

 private:
  void recycle() noexcept override { delete this; }
  VirtualClock& clock_;
  const std::int64_t end_;
};

bool on_host(const ConstView& view) { return view.device.type == DeviceType::cpu && view.count > 0; }

/// Writes the results as if all ranks had the same input.
void fill_result(const OpDesc& call, int ranks) {
  if (!on_host(call.out)) return;
  if (!call.in_counts.empty() || !call.out_counts.empty())  // parts whose lengths differ from this rank's
    throw Unsupported(std::string(name_of(call.kind)) +
                      ": a simulation needs parts of equal length in host memory, since its ranks are alike");
  auto* const out = static_cast<std::byte*>(call.out.data);
  const auto* const in = static_cast<const std::byte*>(call.in.data);
  const auto parts = static_cast<std::size_t>(ranks);
  switch (call.kind) {
    case OpKind::all_gather:
    case OpKind::gather: {
      const std::size_t bytes = call.in.bytes();
      for (std::size_t i = 0; i < parts; ++i)
        if (out + i * bytes != in) std::memcpy(out + i * bytes, in, bytes);
      return;
    }
    case OpKind::all_reduce:
    case OpKind::reduce:
    case OpKind::reduce_scatter: {
      const std::size_t part = call.kind == OpKind::reduce_scatter ? (parts - 1) * call.out.bytes() : 0;
      const std::vector<const void*> sources(parts, in + part);
      const std::vector<double> factors(parts, call.op.scalar);
      reduce_tree(call.op, call.out.dtype, sources, factors, out, call.out.count);
      return;
    }
    case OpKind::broadcast:
      if (call.in.count > 0 && in != out) std::memcpy(out, in, call.out.bytes());
      return;
    case OpKind::all_to_all:
      for (std::size_t i = 0, bytes = call.in.bytes() / parts; i < parts; ++i)
        std::memcpy(out + i * bytes, in + (parts - 1) * bytes, bytes);
      return;
    default:
      throw Unsupported(std::string(name_of(call.kind)) +
                        ": a simulation has no values of other ranks for host memory");
  }
}

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(int ranks, std::shared_ptr<Simulation> simulation, CommunicatorOptions options)
      : Communicator(ranks - 1, ranks, std::move(options)), simulation_(std::move(simulation)) {
    sent_.bytes_to_peer.resize(static_cast<std::size_t>(ranks));
    capabilities_.backend = "sim";
    capabilities_.dtypes = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,
                            DType::u8,  DType::i32, DType::i64, DType::u32,  DType::u64};
    capabilities_.memory = {MemoryKind::host};
    capabilities_.moves_nothing = true;
  }
  const Capabilities& capabilities() const noexcept override { return capabilities_; }

 private:
  Work do_start(const OpDesc& call) override {
    if (call.in.count > 0 || call.out.count > 0 || call.kind == OpKind::barrier) fill_result(call, size());
    return issue(call.kind, std::span(&call, 1));
  }
  Work do_batch(std::span<const OpDesc> parts) override {
    for (const OpDesc& part : parts) fill_result(part, size());
    return issue(parts.empty() ? OpKind::barrier : parts.front().kind, parts);
  }

  /// Returns work that is done when the network model says.
  Work issue(OpKind kind, std::span<const OpDesc> parts) {
    if (!simulation_->aborted.empty()) throw Aborted(simulation_->aborted);
    SimulatedOp operation{.kind = kind, .bytes = 0, .bytes_sent = 0, .ranks = size()};
    for (const OpDesc& part : parts) {
      operation.bytes += std::max(part.in.bytes(), part.out.bytes());
      operation.bytes_sent += count(part);
    }
    const std::int64_t called = std::max(std::exchange(after_, 0), simulation_->clock.host_time());
    const std::int64_t begun = simulation_->network.in_order ? std::max(called, free_) : called;
    const std::int64_t took = size() == 1 ? 0 : simulation_->network.time(operation).count();
    free_ = begun + took;
    return Work(new SimulatedWork(simulation_->clock, free_));
  }

  /// Counts the bytes that this rank sends, by kind and peer.
  std::uint64_t count(const OpDesc& call) {
    const std::uint64_t elements = std::max(call.in.count, call.out.count);
    const std::size_t element = size_of(call.out.count > 0 ? call.out.dtype : call.in.dtype);
    std::uint64_t all = 0;
    for (int peer = 0; peer + 1 < size(); ++peer) {
      const std::uint64_t bytes = direct_bytes_to(call.kind, elements, element,
                                                  {.ranks = size(), .rank = rank(), .peer = peer, .root = call.root});
      sent_.bytes_to_peer[static_cast<std::size_t>(peer)] += bytes;
      all += bytes;
    }
    sent_.by_kind[static_cast<std::size_t>(call.kind)].bytes_sent += all;
    return all;
  }

  std::unique_ptr<Communicator> do_split(int color, int key) override {
    if (color < 0) return nullptr;
    if (key < 0 || key >= size())
      throw InvalidUsage("split: key " + std::to_string(key) + "; a simulation needs keys 0 to " +
                         std::to_string(size() - 1) + ", since its rank is the last one");
    return std::make_unique<SimulatedCommunicator>(key + 1, simulation_, options());
  }

  Buffer do_allocate(std::size_t bytes, MemoryKind, std::optional<MemoryCategory> use) override {
    const std::shared_ptr<DeviceRuntime> host = open_device({});
    void* const data = host->allocate(bytes);
    const std::shared_ptr<MemoryTracker> book = use ? memory_tracker() : nullptr;
    if (book != nullptr) book->add(*use, bytes);
    return {data, bytes, [host, book, use](void* p, std::size_t n) {
              host->free(p, n);
              if (book != nullptr) book->remove(*use, n);
            }};
  }

  void do_abort(std::string_view reason) noexcept override {
    try {
      if (simulation_->aborted.empty())
        simulation_->aborted = "rank " + std::to_string(rank()) + " called abort: " + std::string(reason);
    } catch (const std::bad_alloc&) {  // the next call continues: no rank waits for another
    }
  }
  void do_after(Stream& stream) override {
    if (simulation_->clock.made(stream))
      after_ = simulation_->clock.time_of(stream);
    else if (!stream.immediate())
      stream.record().wait();
  }
  void do_traffic(TrafficStats& snapshot) const override {
    for (std::size_t kind = 0; kind < kOpKinds; ++kind)
      snapshot.by_kind[kind].bytes_sent += sent_.by_kind[kind].bytes_sent;
    snapshot.bytes_to_peer = sent_.bytes_to_peer;
  }

  const std::shared_ptr<Simulation> simulation_;
  Capabilities capabilities_;
  TrafficStats sent_;
  std::int64_t after_ = 0;  // earliest start of the next operation
  std::int64_t free_ = 0;   // when the last operation is done
};

/// Number of sequential messages in an operation's longest chain.
int rounds(OpKind kind) { return kind == OpKind::all_reduce ? 2 : 1; }

}  // namespace

Network alpha_beta(std::chrono::nanoseconds latency, double bytes_per_second) {
  if (latency.count() < 0 || !(bytes_per_second > 0))
    throw InvalidUsage("network: latency " + std::to_string(latency.count()) + " ns and " +
                       std::to_string(bytes_per_second) +
                       " bytes a second; needs a latency of 0 or more and a rate above 0");
  return {.time = [=](const SimulatedOp& operation) {
    const std::chrono::duration<double> sending(static_cast<double>(operation.bytes_sent) / bytes_per_second);
    return rounds(operation.kind) * latency + std::chrono::duration_cast<std::chrono::nanoseconds>(sending);
  }};
}

Network measured(std::map<OpKind, CostTable> seconds) {
  return {.time = [tables = std::move(seconds)](const SimulatedOp& operation) {
    const auto found = tables.find(operation.kind);
    if (found == tables.end())
      throw InvalidUsage("network: " + std::string(name_of(operation.kind)) + " has no measured cost");
    const std::chrono::duration<double> time(found->second.at(static_cast<double>(operation.bytes)));
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time);
  }};
}

std::unique_ptr<Communicator> make_world(int ranks, VirtualClock& clock, Network network, CommunicatorOptions options) {
  if (ranks < 1) throw InvalidUsage("simulation: " + std::to_string(ranks) + " ranks, needs 1 or more");
  if (options.memory_tracker == nullptr) options.memory_tracker = std::make_shared<MemoryTracker>();
  return std::make_unique<SimulatedCommunicator>(
      ranks, std::make_shared<Simulation>(Simulation{clock, std::move(network), {}}), std::move(options));
}

}  // namespace tessera::comm::sim
