#include "tools/plan/cluster_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json/json_reader.h"
#include "tessera/comm/algorithms.h"
#include "tessera/comm/schedule.h"
#include "tools/pages/page.h"
#include "tools/results/run_result.h"

namespace tessera::tools {
namespace {

using base::JsonReader;
using nlohmann::ordered_json;

const std::vector<std::string> kKinds = {"host", "device"};
const std::vector<std::string> kSharing = {"fair", "in_order"};

constexpr double kAboveZero = std::numeric_limits<double>::min();

/// An object of the file. Its keys are those that it was asked for: refuse_others() throws for another one.
class Fields {
 public:
  explicit Fields(JsonReader json) : json_(std::move(json)) { json_.has(""); }  // which throws if it is no object

  bool has(const std::string& key) {
    known_.insert(key);
    return json_.has(key);
  }
  JsonReader operator[](const std::string& key) {
    if (!has(key)) json_.fail("has no '" + key + "'; docs/plan.md says what a cluster file needs");
    return json_.at(key);
  }
  /// The number, at least `low`, or `otherwise`.
  double number_or(const std::string& key, double otherwise, double low, double high = kLargest) {
    return has(key) ? json_.at(key).number(low, high) : otherwise;
  }
  int count_or(const std::string& key, int otherwise, int low) { return has(key) ? count(key, low) : otherwise; }
  int count(const std::string& key, int low) { return static_cast<int>((*this)[key].integer(low, 1 << 20)); }
  std::string text(const std::string& key) {
    const std::string text = (*this)[key];
    if (text.empty()) json_.at(key).fail("is empty; needs a text");
    return text;
  }
  /// The index of the text in `choices`.
  std::size_t choice(const std::string& key, const std::vector<std::string>& choices) {
    const auto found = std::find(choices.begin(), choices.end(), (*this)[key].json());
    if (found == choices.end())
      json_.at(key).fail(
          fmt::format("is {}; needs \"{}\"", base::brief(json_.at(key).json()), fmt::join(choices, "\" or \"")));
    return static_cast<std::size_t>(found - choices.begin());
  }
  void refuse_others() const {
    for (const auto& [key, value] : json_.members())
      if (!known_.contains(key)) value.fail(fmt::format("is not a known key; known here: {}", fmt::join(known_, " ")));
  }
  /// Throws an error about this object.
  [[noreturn]] void fail(const std::string& problem) const { json_.fail(problem); }

  static constexpr double kLargest = std::numeric_limits<double>::max();

 private:
  JsonReader json_;
  std::set<std::string> known_;
};

/// Pairs of numbers, the first ones strictly increasing from 0, the second ones not negative; at least one.
std::vector<MeasuredPoint> points_of(const JsonReader& json) {
  std::vector<MeasuredPoint> all;
  for (const JsonReader& point : json.elements()) {
    if (point.size() != 2) point.fail("has other than two numbers; needs [x, y]");
    all.emplace_back(point.at(0).number(0), point.at(1).number(0));
    if (all.size() > 1 && all.back().first <= all[all.size() - 2].first)
      point.fail(fmt::format("is at {}, not above the one before", all.back().first));
  }
  if (all.empty()) json.fail("is empty; needs points [x, y], x increasing");
  return all;
}

LinkSpec link_of(Fields json) {
  const LinkSpec link{json["latency_us"].number(0), json["bytes_per_second"].number(kAboveZero)};
  json.refuse_others();
  return link;
}

SwitchSpec switch_of(Fields json, const std::string& members) {
  const SwitchSpec level{json.count(members, 1), json.number_or("oversubscription", 1, 1)};
  json.refuse_others();
  return level;
}

void read_links(Fields json, ClusterSpec& cluster) {
  cluster.intra = link_of(Fields(json["intra"]));
  if (json.has("inter")) cluster.inter = link_of(Fields(json["inter"]));
  if (json.has("rack")) cluster.rack = switch_of(Fields(json["rack"]), "hosts_per_rack");
  if (json.has("spine")) cluster.spine = switch_of(Fields(json["spine"]), "racks_per_pod");
  json.refuse_others();
  if (!cluster.inter && cluster.hosts != 1) json.fail("has no 'inter'; needs the link between hosts, or \"hosts\": 1");
  if (!cluster.inter && cluster.rack) json["rack"].fail("joins hosts; needs links.inter too");
  if (!cluster.rack && cluster.spine) json["spine"].fail("joins racks; needs links.rack too");
}

/// Throws that the value has this problem if `parse` throws InvalidUsage.
template <class Parse>
void check(const JsonReader& json, const std::string& problem, Parse&& parse) try {
  parse();
} catch (const base::InvalidUsage&) {
  json.fail(problem);
}

/// The members of an object whose keys are operations.
std::vector<std::pair<std::string, JsonReader>> operations_in(const JsonReader& json) {
  auto members = json.members();
  for (const auto& [name, value] : members)
    check(value, "is not an operation; needs all_reduce, all_gather, reduce_scatter or another",
          [&, &key = name] { comm::parse_op_kind(key); });
  return members;
}

std::map<std::string, std::string> algorithms_of(const JsonReader& json) {
  const std::vector<std::string> known = comm::known_algorithms(/*ordered_only=*/false);
  std::map<std::string, std::string> all;
  for (const auto& [name, value] : operations_in(json)) {
    const std::string choice = all[name] = value.text();
    if (choice == "nccl") continue;
    std::string names;
    for (const std::string& algorithm : known)
      if (algorithm.starts_with(name + "=")) names += ", " + algorithm.substr(name.size() + 1);
    const std::string problem = "is \"" + choice +
                                "\"; needs nccl or, as in TESSERA_ALGO, ALGORITHM[:FROM-TO][;...] of" +
                                (names.empty() ? " none" : names.substr(1));
    if (choice.find(',') != std::string::npos) value.fail(problem);
    check(value, problem, [&, table = name + "=" + choice] { comm::AlgorithmTable(table, known); });
  }
  return all;
}

MeasuredCollective measured_of(Fields entry) {
  MeasuredCollective measured{entry.count("ranks", 1), points_of(entry["points"]), {}, {}};
  if (entry.has("busy")) measured.busy = points_of(entry["busy"]);
  if (entry.has("gap")) measured.gap = points_of(entry["gap"]);
  entry.refuse_others();
  return measured;
}

/// An operation has one table, or an array with one for each number of ranks.
std::map<std::string, std::vector<MeasuredCollective>> measurements_of(const JsonReader& json) {
  std::map<std::string, std::vector<MeasuredCollective>> all;
  for (const auto& [name, value] : operations_in(json)) {
    for (const JsonReader& table : value.json().is_array() ? value.elements() : std::vector{value}) {
      all[name].push_back(measured_of(Fields(table)));
      const int ranks = all[name].back().ranks;
      if (std::ranges::count(all[name], ranks, &MeasuredCollective::ranks) > 1)
        value.fail(fmt::format("has two tables for {} ranks; needs one", ranks));
    }
    if (all[name].empty()) value.fail("is empty; needs a table for each number of ranks");
  }
  return all;
}

std::vector<MeasuredCommunicator> communicators_of(const JsonReader& json) {
  std::vector<MeasuredCommunicator> all;
  for (const JsonReader& element : json.elements()) {
    Fields entry(element);
    all.push_back({entry.count("ranks", 1), static_cast<std::uint64_t>(entry["bytes"].number(0)),
                   static_cast<std::uint64_t>(entry.number_or("ordinary_bytes", 0, 0))});
    entry.refuse_others();
    const int ranks = all.back().ranks;
    if (std::ranges::count(all, ranks, &MeasuredCommunicator::ranks) > 1)
      json.fail(fmt::format("has two entries for {} ranks; needs one", ranks));
  }
  return all;
}

/// Throws for what is not the name of a dtype.
void check_dtype(const JsonReader& json, const std::string& name) {
  check(json, "is not a dtype; needs f32, bf16, f16 or another", [&] { base::parse_dtype(name); });
}

StepOverhead overhead_of(Fields json) {
  StepOverhead overhead;
  for (const auto& [strategy, points] : json["steps"].members()) overhead.steps[strategy] = points_of(points);
  overhead.late = json.number_or("late", 0, 0, 1);
  json.refuse_others();
  return overhead;
}

Efficiencies efficiencies_of(Fields json) {
  const auto fraction = [&](const char* key) { return json.number_or(key, 1, kAboveZero, 1); };
  const Efficiencies all{fraction("product"), fraction("attention"), fraction("memory")};
  json.refuse_others();
  return all;
}

MeasuredKernel kernel_of(Fields json) {
  MeasuredKernel kernel{json.text("kernel"), json.text("dtype"), points_of(json["points"])};
  check_dtype(json["dtype"], kernel.dtype);
  json.refuse_others();
  return kernel;
}

ComputeSpec compute_of(Fields json) {
  ComputeSpec compute;
  compute.kind = static_cast<ComputeSpec::Kind>(json.choice("kind", kKinds));
  compute.memory_bytes = json["memory_bytes"].number(kAboveZero);
  compute.memory_bytes_per_second = json["memory_bytes_per_second"].number(kAboveZero);
  compute.host_link_bytes_per_second = json.number_or("host_link_bytes_per_second", 0, 0);
  compute.kernel_latency_us = json.number_or("kernel_latency_us", 0, 0);
  if (json.has("overhead")) compute.overhead = overhead_of(Fields(json["overhead"]));
  for (const auto& [name, peak] : json["peak_flops"].members()) {
    if (name != "fp8") check_dtype(peak, name);
    compute.peak_flops[name] = peak.number(kAboveZero);
  }
  if (compute.peak_flops.empty()) json["peak_flops"].fail("is empty; needs a number by dtype, such as \"f32\"");
  if (json.has("efficiencies")) compute.efficiencies = efficiencies_of(Fields(json["efficiencies"]));
  if (json.has("kernels"))
    for (const JsonReader& entry : json["kernels"].elements()) compute.kernels.push_back(kernel_of(Fields(entry)));
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

ClusterSpec read_cluster(Fields json) {
  ClusterSpec cluster;
  cluster.name = json.text("name");
  if (json.has("description")) cluster.description = json["description"].text();
  cluster.hosts = json.count_or("hosts", 0, 0);
  cluster.ranks_per_host = json.count("ranks_per_host", 1);
  cluster.nics_per_host = json.count_or("nics_per_host", 1, 1);
  read_links(Fields(json["links"]), cluster);
  if (json.has("sharing")) cluster.sharing = static_cast<PortSharing>(json.choice("sharing", kSharing));
  if (json.has("algorithms")) cluster.algorithms = algorithms_of(json["algorithms"]);
  if (json.has("measured")) cluster.measured = measurements_of(json["measured"]);
  if (json.has("communicators")) cluster.communicators = communicators_of(json["communicators"]);
  cluster.compute = compute_of(Fields(json["compute"]));
  if (json.has("sources"))
    for (const JsonReader& source : json["sources"].elements()) {
      Fields entry(source);
      cluster.sources.push_back({entry.text("key"), entry.text("value"), entry.text("source")});
      entry.refuse_others();
    }
  json.refuse_others();
  return cluster;
}

}  // namespace

ClusterSpec parse_cluster(std::string_view text, const std::string& file) {
  const auto document = base::parse_json<nlohmann::json>(text, "'" + file + "'");
  return read_cluster(Fields({document, "'" + file + "'"}));
}

std::vector<ClusterSpec> cluster_presets() {
  const std::string file = "clusters.json";
  std::vector<ClusterSpec> presets;
  for (const auto& preset : base::parse_json<nlohmann::json>(pages::kClusters, file))
    presets.push_back(read_cluster(Fields({preset, file})));
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
