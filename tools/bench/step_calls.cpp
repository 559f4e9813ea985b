#include "tools/bench/step_calls.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>

#include "tools/bench/buffers.h"
#include "tools/bench/runner.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

const BenchOp* op_of(comm::OpKind kind) {
  for (const BenchOp& op : bench_ops())
    if (op.kind == kind || (kind == comm::OpKind::recv && op.kind == comm::OpKind::send)) return &op;
  return nullptr;
}

/// Values of many magnitudes and signs: their sum depends on the order. The bits are those of f32, whose upper half is
/// a bf16.
float input_value(int rank, std::size_t i) {
  std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(rank + 1) * 0xd6e8feb86659fd93u;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  const auto mantissa = static_cast<float>(static_cast<std::int32_t>(x >> 32)) * 0x1p-31f;
  return mantissa * static_cast<float>(1 << (x & 7));
}

void fill_input(base::DType dtype, int rank, void* data, std::size_t count) {
  base::with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::size_t i = 0; i < count; ++i)
      static_cast<T*>(data)[i] = static_cast<T>(input_value(rank, i) * (std::is_integral_v<T> ? 16 : 1));
  });
}

/// The groups of the world to which this rank belongs, and memory for each call.
class StepCaller {
 public:
  StepCaller(const std::vector<StepCall>& calls, comm::Communicator& world)
      : calls_(calls), world_(world), device_(base::open_device({})), control_(world, *device_) {
    for (const StepCall& call : calls) {
      const auto key = std::pair(call.members.stride, call.members.ranks);
      if (!groups_.contains(key)) groups_[key] = split(key.first, key.second);
    }
    for (const StepCall& call : calls) prepare(call);
  }

  StepCallsResult run(int iterations) {
    StepCallsResult result;
    result.calls.resize(calls_.size());
    for (std::size_t i = 0; i < calls_.size(); ++i) first_call(i, result.calls[i]);
    std::vector<std::vector<double>> us(calls_.size());
    std::vector<double> totals;
    for (int k = 0; k < iterations; ++k) totals.push_back(pass(result.calls, us));
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      if (result.calls[i].refused()) continue;
      result.calls[i].us = slowest_median(us[i]);
      check(i, result.calls[i]);
    }
    result.total_ms = slowest_median(totals) * 1e-3;
    return result;
  }

 private:
  struct Place {
    comm::Communicator* group = nullptr;
    BenchShape shape;
    base::Buffer in, out;
  };

  std::unique_ptr<comm::Communicator> split(int stride, int ranks) {
    const int rank = world_.rank();
    return world_.split(rank / (stride * ranks) * stride + rank % stride, rank);
  }

  void prepare(const StepCall& call) {
    Place place{groups_.at({call.members.stride, call.members.ranks}).get(), {}, {}, {}};
    place.shape = bench_shape(*call.op, call.bytes, call.dtype, call.members.ranks);
    const std::size_t element = base::size_of(call.dtype);
    const auto memory = [&](std::size_t count) {
      return place.group->allocate(std::max<std::size_t>(count, 1) * element, comm::MemoryKind::host,
                                   base::MemoryCategory::communication);
    };
    place.in = memory(place.shape.in_count);
    place.out = memory(place.shape.out_count);
    fill_input(call.dtype, place.group->rank(), place.in.data(), place.shape.in_count);
    places_.push_back(std::move(place));
  }

  BenchCall call_of(std::size_t i, const BenchShape& shape) const {
    const Place& place = places_[i];
    return {.kind = calls_[i].op->kind,
            .in = {place.in.data(), shape.in_count, calls_[i].dtype, {}},
            .out = {place.out.data(), shape.out_count, calls_[i].dtype, {}},
            .op = comm::ReduceOp::sum(),
            .root = 0};
  }

  void first_call(std::size_t i, StepCallTimes& times) {
    const auto algorithm = call_of(i, places_[i].shape).try_on(*places_[i].group, true);
    if (!algorithm) return;
    times.algorithm = algorithm->empty() ? "unnamed" : *algorithm;
    times.hash = hash_over_ranks(i, places_[i].shape);
  }

  /// All calls once. Returns this rank's microseconds for them.
  double pass(const std::vector<StepCallTimes>& known, std::vector<std::vector<double>>& us) {
    world_.barrier().wait();
    const std::int64_t begin = base::host_time_ns();
    std::int64_t last = begin;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      if (known[i].refused()) continue;
      call_of(i, places_[i].shape).start(*places_[i].group).wait();
      const std::int64_t now = base::host_time_ns();
      us[i].push_back(static_cast<double>(now - last) * 1e-3);
      last = now;
    }
    return static_cast<double>(last - begin) * 1e-3;
  }

  double slowest_median(std::vector<double> samples) {
    reduce_to_slowest(control_, samples);
    return median(samples);
  }

  /// After the timed calls: whether the last one gave the bits of the first, and of a call of half the size.
  void check(std::size_t i, StepCallTimes& times) {
    times.same_runs = hash_over_ranks(i, places_[i].shape) == times.hash;
    if (calls_[i].op->reduces) times.same_sizes = halves_are_equal(i);
  }

  std::string hash_over_ranks(std::size_t i, const BenchShape& shape) {
    const comm::View out = call_of(i, shape).out;
    const std::vector<std::uint64_t> mine{out.bytes() == 0 ? 0 : XXH3_64bits(out.data, out.bytes())};
    std::uint64_t all = 0;
    for (const auto& rank : control_.gather_all(mine)) all = all * 0x9e3779b97f4a7c15u + rank[0];
    return fmt::format("{:016x}", all);
  }

  /// The reduced vector, of which each rank of the group may have a part.
  std::vector<std::uint8_t> result_of(std::size_t i, const BenchShape& shape) {
    const comm::View out = call_of(i, shape).out;
    const auto* const begin = static_cast<const std::uint8_t*>(out.data);
    std::vector<std::uint8_t> part(begin, begin + out.bytes()), all;
    if (calls_[i].op->kind != comm::OpKind::reduce_scatter) return part;
    comm::HostCollectives group(*places_[i].group, *device_);
    for (const auto& rank : group.gather_all(part)) all.insert(all.end(), rank.begin(), rank.end());
    return all;
  }

  /// Whether the first half of the result has the bits of a reduction of half the size.
  bool halves_are_equal(std::size_t i) {
    const StepCall& call = calls_[i];
    const BenchShape half = bench_shape(*call.op, call.bytes / 2, call.dtype, call.members.ranks);
    const auto hash_of_half = [&](const std::vector<std::uint8_t>& result) {
      const std::size_t bytes = std::min(result.size(), half.in_count * base::size_of(call.dtype));
      return bytes == 0 ? 0 : XXH3_64bits(result.data(), bytes);
    };
    const std::uint64_t first_half = hash_of_half(result_of(i, places_[i].shape));
    call_of(i, half).start(*places_[i].group).wait();
    return first_half == hash_of_half(result_of(i, half));
  }

  const std::vector<StepCall>& calls_;
  comm::Communicator& world_;
  const std::shared_ptr<base::DeviceRuntime> device_;
  comm::HostCollectives control_;
  std::map<std::pair<int, int>, std::unique_ptr<comm::Communicator>> groups_;  // by stride and ranks
  std::vector<Place> places_;
};

}  // namespace

std::vector<StepCall> step_calls(const std::vector<plan::TransferRecord>& transfers, base::DType reduced, int ranks) {
  std::vector<StepCall> calls;
  for (const plan::TransferRecord& transfer : transfers) {
    const BenchOp* op = op_of(transfer.operation.kind);
    if (op == nullptr || transfer.operation.ranks < 2) continue;
    const std::uint64_t bytes = transfer.operation.bytes;
    const base::DType dtype = op->reduces && bytes % base::size_of(reduced) == 0 ? reduced : base::DType::u8;
    calls.push_back({op, bytes, dtype, transfer.operation.members});
  }
  if (ranks > 1) calls.push_back({op_of(comm::OpKind::all_reduce), sizeof(double), base::DType::f64, {0, 1, ranks}});
  return calls;
}

StepCallsResult time_step_calls(const std::vector<StepCall>& calls, comm::Communicator& world, int iterations) {
  return StepCaller(calls, world).run(iterations);
}

nlohmann::ordered_json to_json(const StepCallTimes& times) {
  return {{"us", times.us},
          {"algorithm", times.algorithm},
          {"hash", times.hash},
          {"same_runs", times.same_runs},
          {"same_sizes", times.same_sizes}};
}

StepCallTimes step_call_times_from_json(const nlohmann::ordered_json& json) {
  return {json.at("us"), json.at("algorithm"), json.at("hash"), json.at("same_runs"), json.at("same_sizes")};
}

}  // namespace tessera::tools
