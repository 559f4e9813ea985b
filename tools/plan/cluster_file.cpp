#include "tools/plan/cluster_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json/json_reader.h"
#include "tessera/comm/algorithms.h"
#include "tessera/comm/schedule.h"
#include "tools/cli/json_object.h"
#include "tools/pages/page.h"
#include "tools/results/run_result.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

const std::vector<std::string> kKinds = {"host", "device"};
const std::vector<std::string> kSharing = {"fair", "in_order"};

LinkSpec link_of(JsonObject json) {
  const LinkSpec link{json.number("latency_us", kNotNegative), json.number("bytes_per_second", kPositive)};
  json.refuse_others();
  return link;
}

SwitchSpec switch_of(JsonObject json, const std::string& members) {
  const SwitchSpec level{json.integer(members, 1),
                         json.number_or("oversubscription", 1, {1, std::numeric_limits<double>::max()})};
  json.refuse_others();
  return level;
}

void read_links(JsonObject json, ClusterSpec& cluster) {
  cluster.intra = link_of(json.object("intra"));
  if (json.has("inter")) cluster.inter = link_of(json.object("inter"));
  if (json.has("rack")) cluster.rack = switch_of(json.object("rack"), "hosts_per_rack");
  if (json.has("spine")) cluster.spine = switch_of(json.object("spine"), "racks_per_pod");
  json.refuse_others();
  if (!cluster.inter && cluster.hosts != 1)
    json.fail("inter", "is missing; expected the link between hosts, or \"hosts\": 1");
  if (!cluster.inter && cluster.rack) json.fail("rack", "joins hosts; expected links.inter too");
  if (!cluster.rack && cluster.spine) json.fail("spine", "joins racks; expected links.rack too");
}

/// Throws that the key has this problem if `parse` throws InvalidUsage.
template <class Parse>
void check(const JsonObject& json, const std::string& key, const std::string& problem, Parse&& parse) try {
  parse();
} catch (const base::InvalidUsage&) {
  json.fail(key, problem);
}

void check_operation(const JsonObject& json, const std::string& name) {
  check(json, name, "is not an operation; expected all_reduce, all_gather, reduce_scatter or another",
        [&] { comm::parse_op_kind(name); });
}

std::map<std::string, std::string> algorithms_of(JsonObject json) {
  const std::vector<std::string> known = comm::known_algorithms(/*ordered_only=*/false);
  std::map<std::string, std::string> all;
  for (const std::string& name : json.keys()) {
    check_operation(json, name);
    const std::string choice = all[name] = json.text(name);
    if (choice == "nccl") continue;
    std::string names;
    for (const std::string& algorithm : known)
      if (algorithm.starts_with(name + "=")) names += ", " + algorithm.substr(name.size() + 1);
    const std::string expected = "; expected nccl or, as in TESSERA_ALGO, ALGORITHM[:FROM-TO][;...] of" +
                                 (names.empty() ? " none" : names.substr(1));
    if (choice.find(',') != std::string::npos) json.fail(name, "is \"" + choice + "\"" + expected);
    check(json, name, "is \"" + choice + "\"" + expected, [&] { comm::AlgorithmTable(name + "=" + choice, known); });
  }
  return all;
}

MeasuredCollective measured_of(JsonObject& entry) {
  MeasuredCollective measured{entry.integer("ranks", 1), entry.points("points"), {}, {}};
  if (entry.has("busy")) measured.busy = entry.points("busy");
  if (entry.has("gap")) measured.gap = entry.points("gap");
  entry.refuse_others();
  return measured;
}

/// An operation has one table, or an array with one for each number of ranks.
std::map<std::string, std::vector<MeasuredCollective>> measurements_of(JsonObject json) {
  std::map<std::string, std::vector<MeasuredCollective>> all;
  for (const std::string& name : json.keys()) {
    check_operation(json, name);
    std::vector<JsonObject> tables = json.is_array(name) ? json.objects(name) : std::vector{json.object(name)};
    for (JsonObject& entry : tables) {
      all[name].push_back(measured_of(entry));
      const int ranks = all[name].back().ranks;
      if (std::ranges::count(all[name], ranks, &MeasuredCollective::ranks) > 1)
        json.fail(name, fmt::format("has two tables for {} ranks; expected one", ranks));
    }
    if (all[name].empty()) json.fail(name, "is empty; expected a table for each number of ranks");
  }
  return all;
}

std::vector<MeasuredCommunicator> communicators_of(JsonObject& json) {
  std::vector<MeasuredCommunicator> all;
  for (JsonObject& entry : json.objects("communicators")) {
    all.push_back({entry.integer("ranks", 1), static_cast<std::uint64_t>(entry.number("bytes", kNotNegative)),
                   static_cast<std::uint64_t>(entry.number_or("ordinary_bytes", 0, kNotNegative))});
    entry.refuse_others();
    const int ranks = all.back().ranks;
    if (std::ranges::count(all, ranks, &MeasuredCommunicator::ranks) > 1)
      json.fail("communicators", fmt::format("has two entries for {} ranks; expected one", ranks));
  }
  return all;
}

/// Throws for what is not the name of a dtype.
std::string dtype_of(const JsonObject& json, const std::string& key, const std::string& name) {
  check(json, key, "is not a dtype; expected f32, bf16, f16 or another", [&] { base::parse_dtype(name); });
  return name;
}

StepOverhead overhead_of(JsonObject json) {
  StepOverhead overhead;
  JsonObject steps = json.object("steps");
  for (const std::string& strategy : steps.keys()) overhead.steps[strategy] = steps.points(strategy);
  overhead.late = json.number_or("late", 0, {0, 1});
  json.refuse_others();
  return overhead;
}

Efficiencies efficiencies_of(JsonObject json) {
  const Efficiencies all{json.number_or("product", 1, kFraction), json.number_or("attention", 1, kFraction),
                         json.number_or("memory", 1, kFraction)};
  json.refuse_others();
  return all;
}

ComputeSpec compute_of(JsonObject json) {
  ComputeSpec compute;
  compute.kind = static_cast<ComputeSpec::Kind>(json.choice("kind", kKinds));
  compute.memory_bytes = json.number("memory_bytes", kPositive);
  compute.memory_bytes_per_second = json.number("memory_bytes_per_second", kPositive);
  compute.host_link_bytes_per_second = json.number_or("host_link_bytes_per_second", 0, kNotNegative);
  compute.kernel_latency_us = json.number_or("kernel_latency_us", 0, kNotNegative);
  if (json.has("overhead")) compute.overhead = overhead_of(json.object("overhead"));
  JsonObject peaks = json.object("peak_flops");
  for (const std::string& name : peaks.keys())
    compute.peak_flops[name == "fp8" ? name : dtype_of(peaks, name, name)] = peaks.number(name, kPositive);
  if (compute.peak_flops.empty()) json.fail("peak_flops", "is empty; expected a number by dtype, such as \"f32\"");
  if (json.has("efficiencies")) compute.efficiencies = efficiencies_of(json.object("efficiencies"));
  if (json.has("kernels"))
    for (JsonObject& entry : json.objects("kernels")) {
      const std::string dtype = entry.text("dtype");
      compute.kernels.push_back({entry.text("kernel"), dtype_of(entry, "dtype", dtype), entry.points("points")});
      entry.refuse_others();
    }
  json.refuse_others();
  return compute;
}

ordered_json links_json(const ClusterSpec& cluster) {
  ordered_json links = {{"intra", link_json(cluster.intra)}};
  if (cluster.inter) links["inter"] = link_json(*cluster.inter);
  if (cluster.rack)
    links["rack"] = {{"hosts_per_rack", cluster.rack->members}, {"oversubscription", cluster.rack->oversubscription}};
  if (cluster.spine)
    links["spine"] = {{"racks_per_pod", cluster.spine->members}, {"oversubscription", cluster.spine->oversubscription}};
  return links;
}

ordered_json to_json(const ComputeSpec& compute) {
  const Efficiencies& parts = compute.efficiencies;
  ordered_json json = {
      {"kind", kKinds[static_cast<std::size_t>(compute.kind)]},
      {"memory_bytes", compute.memory_bytes},
      {"memory_bytes_per_second", compute.memory_bytes_per_second},
      {"kernel_latency_us", compute.kernel_latency_us},
      {"peak_flops", compute.peak_flops},
      {"efficiencies", {{"product", parts.product}, {"attention", parts.attention}, {"memory", parts.memory}}}};
  if (compute.host_link_bytes_per_second > 0) json["host_link_bytes_per_second"] = compute.host_link_bytes_per_second;
  if (!compute.overhead.steps.empty())
    json["overhead"] = {{"steps", compute.overhead.steps}, {"late", compute.overhead.late}};
  for (const MeasuredKernel& kernel : compute.kernels)
    json["kernels"].push_back({{"kernel", kernel.kernel}, {"dtype", kernel.dtype}, {"points", kernel.points}});
  return json;
}

ClusterSpec read_cluster(JsonObject json) {
  ClusterSpec cluster;
  cluster.name = json.text("name");
  cluster.description = json.text_or("description", "");
  cluster.hosts = json.integer_or("hosts", 0, 0);
  cluster.ranks_per_host = json.integer("ranks_per_host", 1);
  cluster.nics_per_host = json.integer_or("nics_per_host", 1, 1);
  read_links(json.object("links"), cluster);
  if (json.has("sharing")) cluster.sharing = static_cast<PortSharing>(json.choice("sharing", kSharing));
  if (json.has("algorithms")) cluster.algorithms = algorithms_of(json.object("algorithms"));
  if (json.has("measured")) cluster.measured = measurements_of(json.object("measured"));
  if (json.has("communicators")) cluster.communicators = communicators_of(json);
  cluster.compute = compute_of(json.object("compute"));
  if (json.has("sources"))
    for (JsonObject& entry : json.objects("sources")) {
      cluster.sources.push_back({entry.text("key"), entry.text("value"), entry.text("source")});
      entry.refuse_others();
    }
  json.refuse_others();
  return cluster;
}

}  // namespace

ClusterSpec parse_cluster(std::string_view text, const std::string& file) {
  const auto document = base::parse_json<nlohmann::json>(text, "'" + file + "'");
  return read_cluster({document, file});
}

std::vector<ClusterSpec> cluster_presets() {
  const std::string file = "clusters.json";
  std::vector<ClusterSpec> presets;
  for (const auto& preset : base::parse_json<nlohmann::json>(pages::kClusters, file))
    presets.push_back(read_cluster({preset, file}));
  return presets;
}

ordered_json to_json(const ClusterSpec& cluster) {
  ordered_json json = {{"name", cluster.name},
                       {"description", cluster.description},
                       {"hosts", cluster.hosts},
                       {"ranks_per_host", cluster.ranks_per_host},
                       {"nics_per_host", cluster.nics_per_host},
                       {"links", links_json(cluster)},
                       {"sharing", kSharing[static_cast<std::size_t>(cluster.sharing)]}};
  if (!cluster.algorithms.empty()) json["algorithms"] = cluster.algorithms;
  for (const auto& [name, tables] : cluster.measured) {
    ordered_json all = ordered_json::array();
    for (const MeasuredCollective& table : tables) {
      all.push_back({{"ranks", table.ranks}, {"points", table.points}});
      if (!table.busy.empty()) all.back()["busy"] = table.busy;
      if (!table.gap.empty()) all.back()["gap"] = table.gap;
    }
    json["measured"][name] = tables.size() == 1 ? all[0] : all;
  }
  for (const MeasuredCommunicator& one : cluster.communicators)
    json["communicators"].push_back(
        {{"ranks", one.ranks}, {"bytes", one.bytes}, {"ordinary_bytes", one.ordinary_bytes}});
  json["compute"] = to_json(cluster.compute);
  for (const Reference& source : cluster.sources)
    json["sources"].push_back({{"key", source.key}, {"value", source.value}, {"source", source.source}});
  return json;
}

ClusterSpec find_cluster(const std::string& name_or_file, std::string_view option) {
  std::string names;
  for (ClusterSpec& preset : cluster_presets()) {
    if (preset.name == name_or_file) return std::move(preset);
    names += " " + preset.name;
  }
  const base::FileText read = base::read_regular(name_or_file);
  if (!read.problem.empty())
    throw base::InvalidUsage(
        fmt::format("{} '{}' is no preset, and as a file: {}; known:{}", option, name_or_file, read.problem, names));
  return parse_cluster(read.text, name_or_file);
}

void check_room(const ClusterSpec& cluster, int ranks) {
  const std::int64_t room = std::int64_t{cluster.hosts} * cluster.ranks_per_host;
  if (cluster.hosts != 0 && ranks > room)
    throw base::InvalidUsage(fmt::format("--ranks {}: cluster {} has room for {}: {} host{} of {} ranks", ranks,
                                         cluster.name, room, cluster.hosts, cluster.hosts == 1 ? "" : "s",
                                         cluster.ranks_per_host));
}

}  // namespace tessera::tools
