#include "tools/bench/machine.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <numeric>
#include <random>

#include "tessera/base/error.h"
#include "tools/bench/buffers.h"
#include "tools/cli/machine.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

/// Fewer than bench: these are medians for a prediction, not the figures of a report.
int iterations_of(const BenchSpec& spec, std::uint64_t bytes) {
  return spec.iterations.value_or(bytes <= (64 << 10) ? 100 : bytes <= (4 << 20) ? 25 : 7);
}

/// By so much the ranks call an operation at different times, since their computations never take equally long.
constexpr double kLargestSkewUs = 100;
/// The computation beside an operation lasts longer than it by this factor, so that the operation is done before.
constexpr double kComputeFactor = 2;

/// Of all threads of this process.
double processor_time_us() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

/// How many ranks share each of the cores that at least one of them may use. Collective.
double ranks_per_core(comm::HostCollectives& control) {
  std::vector<double> mine(CPU_SETSIZE, 0);
  for (const int core : allowed_cores()) mine.at(static_cast<std::size_t>(core)) = 1;
  std::vector<double> used(mine.size(), 0);
  for (const std::vector<double>& rank : control.gather_all(mine))
    for (std::size_t core = 0; core < used.size(); ++core) used[core] = std::max(used[core], rank[core]);
  return control.size() / std::accumulate(used.begin(), used.end(), 0.0);
}

/// One group of ranks that call together.
class GroupMeasurement {
 public:
  GroupMeasurement(const BenchSpec& spec, comm::HostCollectives& control, comm::Communicator& group,
                   base::DeviceRuntime& device)
      : spec_(spec),
        control_(control),
        group_(group),
        ranks_per_core_(ranks_per_core(control)),
        memory_(group, device, spec.communicator_memory) {}

  MeasuredCollective measure_op(const BenchOp& op) {
    const std::vector<std::uint64_t> sizes = spec_.sizes(op);
    const BenchData data{&op, spec_.dtype, spec_.redop, group_.size(), 0};
    std::array<BenchBuffers, 2> buffers{BenchBuffers(memory_, group_.rank(), data, shape_of(op, sizes.back())),
                                        BenchBuffers(memory_, group_.rank(), data, shape_of(op, sizes.back()))};
    MeasuredCollective table{group_.size(), {}, {}, {}};
    for (const std::uint64_t bytes : sizes) {
      const BenchShape shape = shape_of(op, bytes);
      if (shape.bytes == 0 && bytes > 0) continue;
      if (!table.points.empty() && static_cast<double>(shape.bytes) <= table.points.back().first) continue;
      add_times(op, shape, buffers, table);
    }
    return table;
  }

 private:
  BenchShape shape_of(const BenchOp& op, std::uint64_t bytes) const {
    return bench_shape(op, bytes, spec_.dtype, group_.size());
  }

  /// Gradients are reduced in place by all_reduce, as the engine does; everything else has two buffers.
  void add_times(const BenchOp& op, const BenchShape& shape, std::array<BenchBuffers, 2>& buffers,
                 MeasuredCollective& table) {
    const bool in_place = op.kind == comm::OpKind::all_reduce;
    for (BenchBuffers& each : buffers) each.fill(shape, in_place);
    const BenchCall call = buffers[0].call(shape, in_place), next = buffers[1].call(shape, in_place);
    const Repeats repeats{.warmup = spec_.warmup, .iterations = iterations_of(spec_, shape.bytes), .prepare = {}};
    const double alone = median(measure(control_, repeats, [&] { call.start(group_).wait(); }));
    const double both = median(measure(control_, repeats, [&] {
      comm::Work first = call.start(group_);
      next.start(group_).wait();
      first.wait();
    }));
    const auto bytes = static_cast<double>(shape.bytes);
    table.points.emplace_back(bytes, alone);
    table.busy.emplace_back(bytes, busy_us(call, kComputeFactor * alone, repeats));
    table.gap.emplace_back(bytes, std::clamp(both - alone, 0.0, alone));  // a second call lengthens one in flight
  }

  /// The median time by which a call lengthens a computation of the slowest rank. Where ranks share cores, a wait of
  /// one is another's turn, and only the processor's time counts.
  double busy_us(const BenchCall& call, double compute_us, const Repeats& repeats) {
    std::uniform_real_distribution<double> any(0, kLargestSkewUs);
    std::vector<double> added;
    for (int i = -repeats.warmup; i < repeats.iterations; ++i) {
      const double before_us = any(random_), after_us = 2 * kLargestSkewUs - before_us + compute_us;
      const double plain = time_of_part(repeats, [&] {
        computation_.run(before_us);
        computation_.run(after_us);
      });
      const double with_call = time_of_part(repeats, [&] {
        computation_.run(before_us);
        comm::Work work = call.start(group_);
        computation_.run(after_us);
        work.wait();
      });
      if (i >= 0) added.push_back(with_call - plain);
    }
    reduce_to_slowest(control_, added);
    return std::max(0.0, median(added));
  }

  double time_of_part(const Repeats& repeats, const std::function<void()>& part) {
    double processor_us = 0;
    const double us = time_once(control_, repeats, [&] {
      processor_us = -processor_time_us();
      part();
      processor_us += processor_time_us();
    });
    return ranks_per_core_ > 1 ? processor_us * ranks_per_core_ : us;
  }

  const BenchSpec& spec_;
  comm::HostCollectives& control_;
  comm::Communicator& group_;
  const double ranks_per_core_;
  BenchMemory memory_;
  const Computation computation_;
  std::mt19937 random_{static_cast<std::uint32_t>(control_.rank())};  // another skew on each rank
};

}  // namespace

std::vector<int> group_sizes(int ranks) {
  std::vector<int> sizes;
  for (int size = 2; size <= ranks; ++size)
    if (ranks % size == 0) sizes.push_back(size);
  return sizes;
}

CollectiveTables measure_collectives(const BenchSpec& spec, comm::Communicator& world,
                                     const std::function<void(const std::string&)>& say) {
  const std::shared_ptr<base::DeviceRuntime> device = base::open_device({});
  comm::HostCollectives control(world, *device);
  CollectiveTables tables;
  for (const int size : group_sizes(world.size())) {
    const std::unique_ptr<comm::Communicator> group = world.split(world.rank() / size, world.rank() % size);
    GroupMeasurement measurement(spec, control, *group, *device);
    for (const BenchOp* op : spec.ops) {
      say(fmt::format("{} of {} ranks", op->name, size));
      MeasuredCollective table = measurement.measure_op(*op);
      if (!table.points.empty()) tables[std::string(comm::name_of(op->kind))].push_back(std::move(table));
    }
  }
  return tables;
}

std::vector<MeasuredCommunicator> measure_communicators(comm::Communicator& world) {
  constexpr int kCalls = 3;  // two may use buffers of their own, in turn
  const auto tracked = [&] { return world.memory_tracker()->snapshot().now_of(base::MemoryCategory::communication); };
  const std::shared_ptr<base::DeviceRuntime> device = base::open_device({});
  std::vector<int> sizes = group_sizes(world.size());
  sizes.insert(sizes.begin(), 1);
  std::vector<MeasuredCommunicator> all;
  for (const int size : sizes) {
    const std::uint64_t before = tracked();
    const std::unique_ptr<comm::Communicator> group = world.split(world.rank() / size, world.rank() % size);
    const std::uint64_t bytes = tracked() - before;
    comm::HostCollectives control(*group, *device);
    double loss = 0;
    for (int i = 0; i < kCalls; ++i) control.all_reduce(&loss, 1, comm::ReduceOp::avg(), "loss");
    all.push_back({size, bytes, tracked() - before - bytes});
  }
  return all;
}

LinkSpec fit_link(const CollectiveTables& tables, int ranks) {
  std::vector<FitPoint> points;
  if (const auto found = tables.find("all_gather"); found != tables.end())
    for (const MeasuredCollective& table : found->second)
      if (table.ranks == ranks)
        for (const auto& [bytes, us] : table.points)
          points.push_back({bytes * (ranks - 1) / ranks, us});  // what a rank sends
  const std::optional<AlphaBetaFit> fit = fit_alpha_beta(points);
  if (!fit)
    throw base::InvalidUsage("--cluster: a link needs three sizes or more; raise --max-bytes or lower --factor");
  const double us_per_byte =
      fit->beta_us_per_byte > 0 ? fit->beta_us_per_byte : points.back().microseconds / points.back().bytes;
  return {fit->alpha_us, 1e6 / us_per_byte};
}

}  // namespace tessera::tools
