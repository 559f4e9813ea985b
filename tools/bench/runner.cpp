#include "tools/bench/runner.h"

#include <array>
#include <numeric>

#include "tessera/base/error.h"
#include "tools/bench/buffers.h"
#include "tools/bench/environment.h"
#include "tools/bench/long_run.h"
#include "tools/bench/memory_bound.h"
#include "tools/bench/pattern_runner.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kMemcpyBytes = std::size_t{64} << 20;
constexpr std::size_t kMemcpyBytesOfAll = std::size_t{1} << 30;
constexpr int kMemcpyIterations = 7;
constexpr std::size_t kNoiseRounds = 5;
constexpr double kRoundsDisagree = 1.5;  // the slowest round takes so many times as long as the fastest

/// Many for small messages, so that p99 is meaningful; few for large ones, which take long.
int default_iterations(std::uint64_t bytes) { return bytes <= (64 << 10) ? 500 : bytes <= (4 << 20) ? 100 : 20; }

/// How many times as long as the fastest the slowest round took.
double spread_of(const std::vector<double>& rounds) {
  const auto [low, high] = std::ranges::minmax(rounds);
  return low > 0 ? high / low : 1;
}

/// Two calls a round at least: a single one that was interrupted is no noise of the median.
bool rounds_disagree(const std::vector<double>& samples) {
  return samples.size() >= 2 * kNoiseRounds && spread_of(round_medians(samples)) > kRoundsDisagree;
}

double gigabytes_per_second(double bytes, double microseconds) {
  return microseconds > 0 ? bytes / microseconds * 1e-3 : 0;
}

nlohmann::ordered_json measure_memcpy(comm::HostCollectives& world, BenchMemory& memory) {
  const std::size_t most = memory.on_host() ? kMemcpyBytes : memory.larger_than_caches();
  const std::size_t bytes = std::min(most, kMemcpyBytesOfAll / static_cast<std::size_t>(world.size()));
  const MemoryTraffic traffic{0, 0, bytes};
  std::optional<PrivateMemory> of_host;
  if (memory.on_host()) of_host.emplace(memory.host_pool(), traffic);
  const auto copy = [&] { of_host ? of_host->run(traffic, Stores::plain) : memory.move(traffic); };
  const Repeats repeats{.warmup = 1, .iterations = kMemcpyIterations};
  const double alone = median(measure(world, repeats, [&] {
    if (world.rank() == 0) copy();
  }));
  const double together = median(measure(world, repeats, copy));
  const auto size = static_cast<double>(bytes);
  return {{"one_core", gigabytes_per_second(size, alone)},
          {"all_ranks", gigabytes_per_second(size * world.size(), together)}};
}

/// Eight chains, as many as a core can have in flight. The result is a value that the compiler can't predict.
void run_chains(std::int64_t rounds) {
  std::array<double, 8> chains = {1, 2, 3, 4, 5, 6, 7, 8};
  for (std::int64_t i = 0; i < rounds; ++i)
    for (double& x : chains) x = x * 0.999999 + 1e-6;
  for (double& x : chains) asm volatile("" : "+m"(x));
}

/// The state of one rank's measurement.
class BenchRunner {
 public:
  BenchRunner(const BenchSpec& plan, comm::Communicator& world, base::DeviceRuntime& device,
              const BenchCallbacks& callbacks)
      : plan_(plan),
        world_(world),
        control_(world, device),
        slow_world_(slow_copy(world, plan.links)),
        measured_(slow_world_ ? *slow_world_ : world),
        memory_(world, device, plan.communicator_memory),
        callbacks_(callbacks) {
    if (plan.overlap) computation_.emplace();
  }

  void run() {
    tell({{"algorithms", world_.capabilities().algorithms}});
    const nlohmann::ordered_json environment = gather_environment(control_);
    tell({{"environment", environment}});
    if (plan_.pattern) {
      run_pattern(environment);
    } else {
      tell({{"memcpy", measure_memcpy(control_, memory_)}});
      for (const BenchOp* op : plan_.ops) for_each_combination(*op, [&] { run_op(*op); });
    }
    if (plan_.long_run) run_long();
    if (!slow_world_) return;
    const comm::Lateness lateness = latest(control_, *slow_world_);
    tell({{"link", {lateness.median_us, lateness.percent, lateness.shared_calls}}});
  }

 private:
  void tell(const nlohmann::ordered_json& message) const {
    if (world_.rank() == 0 && callbacks_.on_message) callbacks_.on_message(message);
  }

  template <class F>
  void for_each_combination(const BenchOp& op, F&& body) {
    const std::vector all =
        plan_.combinations.empty() ? std::vector{std::pair(plan_.dtype, plan_.redop)} : plan_.combinations;
    for (const auto& [dtype, redop] : all) {
      if (!op.reduces && redop != all.front().second) continue;
      plan_.dtype = dtype;
      plan_.redop = redop;
      body();
    }
  }

  BenchData data_of(const BenchOp& op) const { return {&op, plan_.dtype, plan_.redop, plan_.ranks, plan_.root}; }

  void run_long() {
    LongRun run(plan_, control_, measured_, memory_);
    for (const BenchOp* op : plan_.ops) for_each_combination(*op, [&] { run.add(*op, data_of(*op)); });
    run.run([&](const nlohmann::ordered_json& interval) { tell({{"interval", interval}}); });
  }

  void run_pattern(const nlohmann::ordered_json& environment) {
    PatternRunner runner(plan_, {control_, measured_, memory_}, environment);
    for (const BenchOp* op : plan_.ops)
      for_each_combination(*op, [&] {
        for (const std::uint64_t bytes : plan_.sizes(*op)) tell({{"pattern", runner.run(*op, bytes)}});
      });
  }

  void run_op(const BenchOp& op) {
    const std::vector<std::uint64_t> sizes = plan_.sizes(op);
    const BenchShape largest = bench_shape(op, sizes.back(), plan_.dtype, plan_.ranks, world_.rank());
    BenchBuffers buffers(memory_, world_.rank(), data_of(op), largest, plan_.misaligned);
    std::optional<PrivateMemory> of_host;
    if (memory_.on_host())
      of_host.emplace(memory_.host_pool(), bench_traffic(data_of(op), largest, world_.rank(), false));
    for (const std::uint64_t bytes : sizes) {
      const BenchShape shape = bench_shape(op, bytes, plan_.dtype, plan_.ranks, world_.rank());
      const auto out_of_place = measure_call(op, shape, buffers, of_host, false);
      if (!out_of_place) continue;
      nlohmann::ordered_json message = {{"row", to_json(*out_of_place)}};
      const auto in_place = op.in_place ? measure_call(op, shape, buffers, of_host, true) : std::nullopt;
      if (in_place) message["in_place"] = to_json(*in_place);
      tell(message);
    }
  }

  std::optional<BenchResult> measure_call(const BenchOp& op, const BenchShape& shape, BenchBuffers& buffers,
                                          const std::optional<PrivateMemory>& of_host, bool in_place) {
    buffers.fill(shape, in_place);
    const BenchCall call = buffers.call(shape, in_place);
    const std::optional<std::string> algorithm = call.try_on(measured_, plan_.leave_out_refused);
    if (!algorithm) return std::nullopt;
    const int messages = messages_of(op);
    const int usual =
        messages == 1 ? default_iterations(shape.bytes) : std::max(10, default_iterations(shape.bytes) / 10);
    Repeats repeats{.warmup = plan_.warmup, .iterations = plan_.iterations.value_or(usual)};
    if (plan_.time_limit) shorten(repeats, call);
    if (plan_.cold) repeats.prepare = [&call] { call.evict(); };
    BenchResult result{.backend = std::string(world_.backend()),
                       .op = std::string(op.name),
                       .bytes = shape.bytes,
                       .dtype = std::string(base::name_of(plan_.dtype)),
                       .redop = op.reduces ? std::string(comm::name_of(plan_.redop)) : "none",
                       .in_place = in_place,
                       .memory = plan_.communicator_memory ? "communicator" : "ordinary",
                       .algorithm = *algorithm};
    const Repeats timed = plan_.aggregate ? batches_of(repeats) : repeats;
    const int calls = std::max(1, repeats.iterations / timed.iterations);
    const auto run = [&] {
      std::vector<double> samples = measure(control_, timed, [&] {
        for (int i = 0; i < calls; ++i) call.run(measured_);
      });
      for (double& us : samples) us /= messages * calls;
      return samples;
    };
    std::vector<double> samples = run();
    if (rounds_disagree(samples)) {
      std::vector<double> again = run();
      if (spread_of(round_medians(again)) < spread_of(round_medians(samples))) samples = std::move(again);
      result.noisy = rounds_disagree(samples);
    }
    result.rounds_us = round_medians(samples);
    const double sum = std::accumulate(samples.begin(), samples.end(), 0.0);
    result.time_us = bench_times(samples);
    if (plan_.aggregate) result.time_us.median = sum / static_cast<double>(samples.size());
    result.algbw_gbps = gigabytes_per_second(static_cast<double>(shape.bytes), result.time_us.median);
    result.busbw_gbps = result.algbw_gbps * bus_factor(op, plan_.ranks);
    if (messages == kWindow && result.time_us.median > 0)
      result.messages_per_second = 1e6 / result.time_us.median * bus_factor(op, plan_.ranks);
    result.bound_us = measure_bound(bench_traffic(data_of(op), shape, world_.rank(), in_place), of_host, repeats);
    if (plan_.overlap)
      result.overlap_percent = overlap_percent(measure_overlap(
          control_, fewer(repeats), [&] { return call.start(measured_); },
          [&] { computation_->run(result.time_us.median); }));
    if (plan_.check) result.wrong = check(op, shape, buffers, in_place);
    return result;
  }

  /// As many calls, back to back in a few batches with a sample each.
  static Repeats batches_of(const Repeats& calls) {
    constexpr int kBatches = 20;
    return {std::min(calls.warmup, 1), std::min(calls.iterations, kBatches), {}};
  }

  /// A point is measured twice at most, and its bound and overlap take less.
  void shorten(Repeats& repeats, const BenchCall& call) {
    const double us = measure(control_, {}, [&] { call.run(measured_); }).front();
    const double calls = static_cast<double>(plan_.time_limit->count()) * 1e3 / (4 * std::max(us, 0.01));
    repeats.iterations = static_cast<int>(std::clamp(calls, 1.0, static_cast<double>(repeats.iterations)));
    repeats.warmup = std::min(repeats.warmup, repeats.iterations);
  }

  double measure_bound(const MemoryTraffic& traffic, const std::optional<PrivateMemory>& of_host, const Repeats& main) {
    Repeats repeats = fewer(main);
    if (!of_host) return median(measure(control_, repeats, [&] { memory_.move(traffic); }));
    if (plan_.cold) repeats.prepare = [&] { of_host->evict(traffic); };
    const auto with = [&](Stores stores) {
      return median(measure(control_, repeats, [&] { of_host->run(traffic, stores); }));
    };
    const double plain = with(Stores::plain);
    return std::min(plain, with(Stores::non_temporal));
  }

  /// Calls once more, with fresh inputs and poisoned outputs.
  std::uint64_t check(const BenchOp& op, const BenchShape& shape, BenchBuffers& buffers, bool in_place) {
    const BenchData data = data_of(op);
    buffers.fill(shape, in_place);
    buffers.call(shape, in_place).run(measured_);
    const bool has_output = !expected_parts(data, shape, world_.rank()).empty();
    const comm::View out = buffers.output(shape, in_place);
    if (has_output && callbacks_.before_check) callbacks_.before_check(out);
    std::uint64_t wrong = has_output ? count_wrong(data, shape, world_.rank(), out.data) : 0;
    control_.all_reduce(&wrong, 1, comm::ReduceOp::sum(), "bench");
    return wrong;
  }

  BenchSpec plan_;  ///< its dtype and redop are those of the current table
  comm::Communicator& world_;
  comm::HostCollectives control_;
  std::unique_ptr<comm::Communicator> slow_world_;  ///< only with links
  comm::Communicator& measured_;
  BenchMemory memory_;
  const BenchCallbacks& callbacks_;
  std::optional<Computation> computation_;  ///< only with --overlap
};

}  // namespace

std::vector<std::uint64_t> BenchSpec::sizes(const BenchOp& op) const {
  if (op.kind == comm::OpKind::barrier) return {0};
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t bytes = min_bytes; bytes <= max_bytes; bytes *= factor) {
    sizes.push_back(bytes);
    if (bytes > max_bytes / factor) break;
  }
  return sizes;
}

BenchTimes bench_times(std::vector<double> samples) {
  if (samples.empty()) throw base::InvalidUsage("no samples; --iterations must be 1 or more");
  std::sort(samples.begin(), samples.end());
  const std::size_t n = samples.size();
  return {median(samples), samples[(n * 99 + 99) / 100 - 1], samples.front(), samples.back()};
}

std::vector<double> round_medians(const std::vector<double>& samples) {
  const std::size_t n = samples.size(), rounds = std::min(kNoiseRounds, n);
  std::vector<double> medians;
  for (std::size_t k = 0; k < rounds; ++k) {
    const auto at = [&](std::size_t i) { return samples.begin() + static_cast<std::ptrdiff_t>(n * i / rounds); };
    medians.push_back(median({at(k), at(k + 1)}));
  }
  return medians;
}

Computation::Computation() {
  constexpr std::int64_t kTimedRounds = 20'000;
  constexpr int kAttempts = 20;  // the fastest counts: the others were interrupted
  double best = 1e9;
  for (int i = 0; i < kAttempts; ++i) {
    const std::int64_t start = base::host_time_ns();
    run_chains(kTimedRounds);
    best = std::min(best, static_cast<double>(std::max<std::int64_t>(1, base::host_time_ns() - start)) * 1e-3);
  }
  rounds_per_microsecond_ = static_cast<double>(kTimedRounds) / best;
}

void Computation::run(double microseconds) const {
  run_chains(std::max<std::int64_t>(1, static_cast<std::int64_t>(microseconds * rounds_per_microsecond_)));
}

double overlap_percent(const OverlapTimes& times) {
  return times.pure <= 0 ? 0 : std::max(0.0, 100 * (1 - (times.total - times.compute) / times.pure));
}

OverlapTimes measure_overlap(comm::HostCollectives& world, const Repeats& repeats,
                             const std::function<comm::Work()>& start, const std::function<void()>& compute) {
  const auto both = [&] {
    comm::Work work = start();
    compute();
    work.wait();
  };
  std::array<std::vector<double>, 3> samples;
  for (int i = -repeats.warmup; i < repeats.iterations; ++i) {
    const std::array times = {time_once(world, repeats, [&] { start().wait(); }), time_once(world, repeats, compute),
                              time_once(world, repeats, both)};
    for (std::size_t k = 0; i >= 0 && k < times.size(); ++k) samples[k].push_back(times[k]);
  }
  for (std::vector<double>& each : samples) reduce_to_slowest(world, each);
  return {median(samples[0]), median(samples[1]), median(samples[2])};
}

void run_bench(const BenchSpec& plan, comm::Communicator& world, base::DeviceRuntime& device,
               const BenchCallbacks& callbacks) {
  BenchRunner(plan, world, device, callbacks).run();
}

bool same_table(const BenchResult& a, const BenchResult& b) {
  return a.backend == b.backend && a.op == b.op && a.dtype == b.dtype && a.redop == b.redop;
}

nlohmann::ordered_json to_json(const BenchResult& r) {
  nlohmann::ordered_json json = {
      {"backend", r.backend},
      {"op", r.op},
      {"bytes", r.bytes},
      {"dtype", r.dtype},
      {"redop", r.redop},
      {"time_us",
       {{"median", r.time_us.median}, {"p99", r.time_us.p99}, {"min", r.time_us.min}, {"max", r.time_us.max}}},
      {"algbw_gbps", r.algbw_gbps},
      {"busbw_gbps", r.busbw_gbps},
      {"wrong", r.wrong ? nlohmann::ordered_json(*r.wrong) : nlohmann::ordered_json()},
      {"in_place", r.in_place},
      {"memory", r.memory},
      {"algorithm", r.algorithm},
      {"bound_us", r.bound_us},
      {"rounds_us", r.rounds_us},
      {"noisy", r.noisy}};
  if (r.overlap_percent) json["overlap_percent"] = *r.overlap_percent;
  if (r.messages_per_second) json["messages_per_second"] = *r.messages_per_second;
  return json;
}

BenchResult bench_result_from_json(const nlohmann::ordered_json& json) {
  const auto& time = json.at("time_us");
  BenchResult r{.backend = json.at("backend"),
                .op = json.at("op"),
                .bytes = json.at("bytes"),
                .dtype = json.at("dtype"),
                .redop = json.value("redop", ""),
                .time_us = {time.at("median"), time.at("p99"), time.at("min"), time.at("max")},
                .algbw_gbps = json.at("algbw_gbps"),
                .busbw_gbps = json.at("busbw_gbps"),
                .in_place = json.at("in_place"),
                .memory = json.at("memory"),
                .algorithm = json.at("algorithm"),
                .bound_us = json.at("bound_us"),
                .rounds_us = json.value("rounds_us", std::vector<double>{}),
                .noisy = json.value("noisy", false)};
  if (json.contains("overlap_percent")) r.overlap_percent = json.at("overlap_percent").get<double>();
  if (json.contains("messages_per_second")) r.messages_per_second = json["messages_per_second"].get<double>();
  if (!json.at("wrong").is_null()) r.wrong = json.at("wrong").get<std::uint64_t>();
  return r;
}

BenchRow bench_row_from_json(const nlohmann::ordered_json& message) {
  BenchRow row{bench_result_from_json(message.at("row")), {}};
  if (message.contains("in_place")) row.in_place = bench_result_from_json(message["in_place"]);
  return row;
}

}  // namespace tessera::tools
