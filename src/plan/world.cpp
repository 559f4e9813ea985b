#include "tessera/plan/world.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::plan {
namespace {

/// The state that a world and all its splits share.
struct Simulation {
  Simulation(VirtualClock& virtual_clock, Network model)
      : clock(virtual_clock),
        network(std::move(model)),
        links(std::make_shared<SharedLinks>(network.links, network.sharing)) {
    clock.set_transfer_model(links);
  }
  VirtualClock& clock;
  const Network network;
  const std::shared_ptr<SharedLinks> links;
  struct Call {
    TransferRecord record;        // without times
    std::array<TaskId, 2> after;  // what it waits for on this rank
  };
  std::vector<Call> calls;
  std::string aborted;
};

class SimulatedWork final : public comm::WorkState {
 public:
  SimulatedWork(VirtualClock& clock, TaskId task) : clock_(clock), task_(task) {}
  bool done() noexcept override {
    try {
      return clock_.times_of(task_).end_ns <= clock_.host_time();
    } catch (const base::InvalidUsage&) {  // a time that can't be counted: waiting throws it
      return true;
    }
  }
  bool wait_until(std::chrono::steady_clock::time_point) override {
    wait();
    return true;
  }
  void wait() override { clock_.host_waits_for(task_); }
  void wait_on(base::Stream& stream) override { clock_.wait_for(stream, task_); }
  void on_done(comm::WorkCallback callback) override {
    if (callback) throw base::Unsupported("on_done: the operations of a simulation end in virtual time; wait for them");
  }

 private:
  void recycle() noexcept override { delete this; }
  VirtualClock& clock_;
  const TaskId task_;
};

/// A larger all_reduce is of gradients, in memory of the communicator.
constexpr std::size_t kOrdinaryBytes = 1024;

bool on_host(const comm::ConstView& view) { return view.device.type == base::DeviceType::cpu && view.count > 0; }

/// Writes the results as if all ranks had the same input.
void fill_result(const comm::OpDesc& call, int ranks) {
  if (!on_host(call.out)) return;
  if (!call.in_counts.empty() || !call.out_counts.empty())  // parts whose lengths differ from this rank's
    throw base::Unsupported(std::string(name_of(call.kind)) +
                            ": a simulation needs parts of equal length in host memory, since its ranks are alike");
  auto* const out = static_cast<std::byte*>(call.out.data);
  const auto* const in = static_cast<const std::byte*>(call.in.data);
  const auto parts = static_cast<std::size_t>(ranks);
  switch (call.kind) {
    case comm::OpKind::all_gather:
    case comm::OpKind::gather: {
      const std::size_t bytes = call.in.bytes();
      for (std::size_t i = 0; i < parts; ++i)
        if (out + i * bytes != in) std::memcpy(out + i * bytes, in, bytes);
      return;
    }
    case comm::OpKind::all_reduce:
    case comm::OpKind::reduce:
    case comm::OpKind::reduce_scatter: {
      const std::size_t part = call.kind == comm::OpKind::reduce_scatter ? (parts - 1) * call.out.bytes() : 0;
      const std::vector<const void*> sources(parts, in + part);
      const std::vector<double> factors(parts, call.op.scalar);
      comm::reduce_tree(call.op, call.out.dtype, sources, factors, out, call.out.count);
      return;
    }
    case comm::OpKind::broadcast:
      if (call.in.count > 0 && in != out) std::memcpy(out, in, call.out.bytes());
      return;
    case comm::OpKind::all_to_all:
      for (std::size_t i = 0, bytes = call.in.bytes() / parts; i < parts; ++i)
        std::memcpy(out + i * bytes, in + (parts - 1) * bytes, bytes);
      return;
    default:
      throw base::Unsupported(std::string(name_of(call.kind)) +
                              ": a simulation has no values of other ranks for host memory");
  }
}

class SimulatedCommunicator final : public comm::Communicator {
 public:
  SimulatedCommunicator(RankSet members, std::shared_ptr<Simulation> simulation, comm::CommunicatorOptions options)
      : comm::Communicator(members.ranks - 1, members.ranks, std::move(options)),
        simulation_(std::move(simulation)),
        members_(members) {
    sent_.bytes_to_peer.resize(static_cast<std::size_t>(members.ranks));
    track(memory_, &CommunicatorMemory::bytes);
    capabilities_.backend = "sim";
    capabilities_.dtypes = {base::DType::f32, base::DType::f64, base::DType::f16, base::DType::bf16, base::DType::i8,
                            base::DType::u8,  base::DType::i32, base::DType::i64, base::DType::u32,  base::DType::u64};
    capabilities_.memory = {comm::MemoryKind::host};
    capabilities_.moves_nothing = true;
  }
  const comm::Capabilities& capabilities() const noexcept override { return capabilities_; }
  const Simulation& simulation() const { return *simulation_; }

 private:
  comm::Work do_start(const comm::OpDesc& call) override {
    if (call.in.count > 0 || call.out.count > 0 || call.kind == comm::OpKind::barrier) fill_result(call, size());
    if (call.kind == comm::OpKind::all_reduce && call.in.bytes() <= kOrdinaryBytes &&
        !std::exchange(has_reduced_, true))
      track(ordinary_memory_, &CommunicatorMemory::ordinary_bytes);
    return issue(call.kind, std::span(&call, 1));
  }
  comm::Work do_batch(std::span<const comm::OpDesc> parts) override {
    for (const comm::OpDesc& part : parts) fill_result(part, size());
    return issue(parts.empty() ? comm::OpKind::barrier : parts.front().kind, parts);
  }

  /// Returns work that is done when the network model says.
  comm::Work issue(comm::OpKind kind, std::span<const comm::OpDesc> parts) {
    if (!simulation_->aborted.empty()) throw base::Aborted(simulation_->aborted);
    SimulatedOp operation{.kind = kind, .bytes = 0, .bytes_sent = 0, .ranks = size(), .members = members_};
    for (const comm::OpDesc& part : parts) {
      operation.bytes += std::max(part.in.bytes(), part.out.bytes());
      operation.bytes_sent += count(part);
    }
    VirtualClock& clock = simulation_->clock;
    const TaskId host = clock.host_position();
    const TaskId after = std::exchange(after_, 0);
    if (size() == 1) return comm::Work(new SimulatedWork(clock, after == 0 ? host : after));
    std::vector<TaskId> earlier{host, after};
    if (simulation_->network.in_order) earlier.push_back(last_);
    const std::uint32_t transfer = simulation_->links->add(simulation_->network.cost(operation));
    last_ = clock.add_transfer(transfer, earlier, name_of(kind));
    simulation_->calls.push_back(
        {{.operation = operation, .task = last_, .label = parts.empty() ? "" : std::string(parts.front().label)},
         {host, after}});
    if (simulation_->network.busy) clock.advance_host(simulation_->network.busy(operation).count(), name_of(kind));
    return comm::Work(new SimulatedWork(clock, last_));
  }

  /// Counts that part of the communicator's memory.
  void track(base::TrackedBytes& tracked, std::uint64_t CommunicatorMemory::*part) {
    const auto& memory = simulation_->network.memory;
    const auto own = memory.find(size());
    if (own != memory.end()) tracked = {*memory_tracker(), base::MemoryCategory::communication, own->second.*part};
  }

  /// Counts the bytes that this rank sends, by kind and peer.
  std::uint64_t count(const comm::OpDesc& call) {
    const std::uint64_t elements = std::max(call.in.count, call.out.count);
    const std::size_t element = size_of(call.out.count > 0 ? call.out.dtype : call.in.dtype);
    std::uint64_t all = 0;
    for (int peer = 0; peer + 1 < size(); ++peer) {
      const std::uint64_t bytes = comm::direct_bytes_to(
          call.kind, elements, element, {.ranks = size(), .rank = rank(), .peer = peer, .root = call.root});
      sent_.bytes_to_peer[static_cast<std::size_t>(peer)] += bytes;
      all += bytes;
    }
    sent_.by_kind[static_cast<std::size_t>(call.kind)].bytes_sent += all;
    return all;
  }

  std::unique_ptr<comm::Communicator> do_split(int color, int key, const comm::SplitOptions&) override {
    if (color < 0) return nullptr;
    if (key < 0 || key >= size())
      throw base::InvalidUsage("split: key " + std::to_string(key) + "; a simulation needs keys 0 to " +
                               std::to_string(size() - 1) + ", since its rank is the last one");
    const int stride = key == 0 ? 1 : (rank() - color) / key;
    if (stride < 1 || color + key * stride != rank())
      throw base::InvalidUsage(
          "split: color " + std::to_string(color) + " with key " + std::to_string(key) +
          "; a simulation needs the lowest member's rank as the color, and members at equal distances");
    const RankSet members{members_.first + color * members_.stride, members_.stride * stride, key + 1};
    return std::make_unique<SimulatedCommunicator>(members, simulation_, options());
  }

  std::unique_ptr<comm::Communicator> do_create_group(std::span<const int> members, const comm::OpOptions&) override {
    const int stride = members.size() == 1 ? 1 : members[1] - members[0];
    for (std::size_t k = 0; k < members.size(); ++k)
      if (stride < 1 || members[k] != members[0] + static_cast<int>(k) * stride || members.back() != rank())
        throw base::InvalidUsage(
            "create_group: a simulation needs members at equal distances, its own rank as the last one");
    const RankSet set{members_.first + members[0] * members_.stride, members_.stride * stride,
                      static_cast<int>(members.size())};
    return std::make_unique<SimulatedCommunicator>(set, simulation_, options());
  }

  base::Buffer do_allocate(std::size_t bytes, comm::MemoryKind, std::optional<base::MemoryCategory> use) override {
    const std::shared_ptr<base::DeviceRuntime> host = base::open_device({});
    void* const data = host->allocate(bytes);
    const std::shared_ptr<base::MemoryTracker> book = use ? memory_tracker() : nullptr;
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
  void do_after(base::Stream& stream) override {
    if (simulation_->clock.made(stream))
      after_ = simulation_->clock.position(stream);
    else if (!stream.immediate())
      stream.record().wait();
  }
  void do_traffic(comm::TrafficStats& snapshot) const override {
    for (std::size_t kind = 0; kind < comm::kOpKinds; ++kind)
      snapshot.by_kind[kind].bytes_sent += sent_.by_kind[kind].bytes_sent;
    snapshot.bytes_to_peer = sent_.bytes_to_peer;
  }

  const std::shared_ptr<Simulation> simulation_;
  const RankSet members_;
  comm::Capabilities capabilities_;
  comm::TrafficStats sent_;
  base::TrackedBytes memory_, ordinary_memory_;
  bool has_reduced_ = false;  // memory that it did not allocate
  TaskId after_ = 0;          // what the next operation waits for
  TaskId last_ = 0;           // the last operation
};

}  // namespace

std::unique_ptr<comm::Communicator> make_world(int ranks, VirtualClock& clock, Network network,
                                               comm::CommunicatorOptions options) {
  if (ranks < 1) throw base::InvalidUsage("simulation: " + std::to_string(ranks) + " ranks, needs 1 or more");
  if (options.memory_tracker == nullptr) options.memory_tracker = std::make_shared<base::MemoryTracker>();
  return std::make_unique<SimulatedCommunicator>(
      RankSet{0, 1, ranks}, std::make_shared<Simulation>(clock, std::move(network)), std::move(options));
}

std::vector<TransferRecord> transfers_of(const comm::Communicator& communicator) {
  const auto* simulated = dynamic_cast<const SimulatedCommunicator*>(&communicator);
  if (simulated == nullptr) throw base::InvalidUsage("transfers_of: the communicator is not simulated");
  const Simulation& simulation = simulated->simulation();
  std::vector<TransferRecord> records;
  for (const Simulation::Call& call : simulation.calls) {
    TransferRecord& record = records.emplace_back(call.record);
    for (const TaskId task : call.after)
      record.called_ns = std::max(record.called_ns, simulation.clock.times_of(task).end_ns);
    record.begun_ns = simulation.links->begun(simulation.clock.graph().tasks()[record.task].transfer);
    record.done_ns = simulation.clock.times_of(record.task).end_ns;
  }
  return records;
}

}  // namespace tessera::plan
