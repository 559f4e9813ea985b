#include "tools/bench/cluster_bench.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tools/bench/fit.h"
#include "tools/bench/machine_kernels.h"
#include "tools/bench/machine_links.h"
#include "tools/bench/step_overhead.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/launch/ranks.h"
#include "tools/results/comparison.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

void print_now(const std::string& text) {
  print_clean("{}", text);
  std::fflush(stdout);
}

constexpr int kMostSteps = 40;

std::string today() {
  return fmt::format("{:%Y-%m-%d}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

/// Called by the process that sees all cores: a bound rank sees only its share.
std::string description_of(const std::string& backend, int ranks) {
  return fmt::format("{}; {} ranks over {}, {}", machine_line(), ranks, backend, today());
}

double memory_of_rank(int ranks) {
  struct sysinfo memory {};
  if (::sysinfo(&memory) != 0) return 1;
  return static_cast<double>(memory.totalram) * memory.mem_unit / ranks;
}

void add_sources(ClusterSpec& cluster, const std::string& algorithms) {
  const std::string source = "measured by tessera bench --cluster";
  cluster.sources = {{"links.intra", "the line through the times of all_gather among all ranks", source},
                     {"measured",
                      "medians of the slowest rank, all groups of ranks at once" +
                          (algorithms.empty() ? std::string() : ", TESSERA_ALGO=" + algorithms),
                      source},
                     {"compute.memory_bytes", "the host's memory divided by the ranks", source},
                     {"compute.memory_bytes_per_second", "the median rate of the kernels that are no products", source},
                     {"compute.kernel_latency_us", "what a step takes besides its kernels, for each of them", source},
                     {"compute.overhead", "steps of four models, as trained and as simulated", source},
                     {"compute.peak_flops", "the fastest product", source},
                     {"compute.efficiencies", "1: the peaks are measured", source},
                     {"compute.kernels", "medians while all ranks compute at once", source}};
}

int threads_per_rank(const BenchOptions& options, int ranks) {
  return options.threads.value_or(std::max(1, static_cast<int>(allowed_cores().size()) / ranks));
}

ClusterSpec measure_as_rank(const BenchOptions& options, const BenchSpec& spec, const std::string& backend,
                            const std::function<void(const std::string&)>& say) {
  auto world = init_world({.ranks = spec.ranks,
                           .backend = backend,
                           .algorithms = "",
                           .memory_tracker = std::make_shared<base::MemoryTracker>()});
  const bool first = world->rank() == 0;
  ClusterSpec cluster =
      measure_cluster(spec, *world, threads_per_rank(options, spec.ranks), [&](const std::string& line) {
        if (first) say(line);
      });
  world.reset();  // two worlds can't listen on one TESSERA_MASTER
  // The memory is that of a run of compare, with which plans can be compared to the byte.
  const auto compared = init_world({.ranks = spec.ranks,
                                    .backend = backend,
                                    .algorithms = kComparedAlgorithms,
                                    .generation = 1,
                                    .memory_tracker = std::make_shared<base::MemoryTracker>()});
  cluster.communicators = measure_communicators(*compared);
  return cluster;
}

void say_part(const std::string& line) { print_now("# measuring " + line + "\n"); }

int write_cluster_file(const BenchOptions& options, const ordered_json& cluster) {
  write_json(options.cluster, cluster);
  print_now(fmt::format("# {}\n# {} is written; tessera plan --cluster {} uses it\n",
                        cluster.at("description").get<std::string>(), options.cluster, options.cluster));
  return 0;
}

int measure_in_ranks(const CommandLine& commands, const BenchOptions& options, const BenchSpec& spec) {
  const std::string& backend = spec.backends.front();
  ordered_json cluster;
  const int code =
      run_ranks(commands, spec, backend, {"--threads", std::to_string(threads_per_rank(options, spec.ranks))},
                [&](const ordered_json& line) {
                  if (line.contains("part")) say_part(line["part"].get<std::string>());
                  if (line.contains("cluster")) cluster = line["cluster"];
                });
  if (code == 0) cluster["description"] = description_of(backend, spec.ranks);
  return code != 0 ? code : write_cluster_file(options, cluster);
}

}  // namespace

ClusterSpec measure_cluster(const BenchSpec& spec, comm::Communicator& world, int threads,
                            const std::function<void(const std::string&)>& say) {
  ClusterSpec cluster;
  cluster.name = fmt::format("{}-{}", world.backend(), world.size());
  cluster.description = description_of(std::string(world.backend()), world.size());
  cluster.hosts = 1;
  cluster.ranks_per_host = world.size();
  cluster.sharing = PortSharing::in_order;  // as calls in flight were measured
  cluster.measured = measure_collectives(spec, world, say);
  cluster.intra = fit_link(cluster.measured, world.size());
  const ComputeMeasurement measurement{
      .threads = threads, .most_steps = spec.iterations.value_or(kMostSteps), .say = say};
  cluster.compute = measure_compute(world, measurement);
  cluster.compute.memory_bytes = memory_of_rank(world.size());
  cluster.compute.overhead = measure_step_overhead(cluster, world, measurement);
  add_sources(cluster, comm_variable("TESSERA_ALGO").value_or(""));
  return cluster;
}

int bench_cluster(const CommandLine& commands, const BenchOptions& options, BenchSpec spec) {
  if (spec.backends.size() != 1)
    throw base::InvalidUsage(fmt::format("--cluster: a file is for one backend, not for {}; give one --backend",
                                         fmt::join(spec.backends, ",")));
  if (spec.ranks == 1) throw base::InvalidUsage("--cluster needs two ranks or more, not --ranks 1");
  spec.ops.clear();
  for (const char* name : {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"})
    spec.ops.push_back(&bench_op(name));
  if (spec.sizes(*spec.ops.front()).size() < kFewestFitPoints)
    throw base::InvalidUsage("--cluster: a link needs three sizes or more; raise --max-bytes or lower --factor");
  if (!options.only.empty()) {
    const auto line = [](const ordered_json& json) { print_json(json); };
    const ClusterSpec cluster = measure_as_rank(options, spec, options.only, [&](const std::string& part) {
      line({{"part", part}});
    });
    if (comm::resolve_launch().rank == 0) line({{"cluster", to_json(cluster)}});
    return 0;
  }
  const bool first = comm::resolve_launch().rank == 0;
  if (first) check_writable("--cluster", options.cluster);
  if (must_spawn(spec.ranks)) {
    warn_if_alone_under_launcher(spec.ranks);
    return measure_in_ranks(commands, options, spec);
  }
  const ClusterSpec cluster = measure_as_rank(options, spec, spec.backends.front(), say_part);
  return first ? write_cluster_file(options, to_json(cluster)) : 0;
}

}  // namespace tessera::tools
