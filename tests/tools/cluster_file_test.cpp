// The cluster file: presets, errors and what is read back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {
namespace {

using testing::HasSubstr;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const base::InvalidUsage& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "";
}

/// The paths of all numbers of a document.
void number_paths(const nlohmann::json& value, const std::string& path, std::vector<std::string>& paths) {
  if (value.is_number()) paths.push_back(path);
  if (value.is_object())
    for (const auto& [key, child] : value.items()) number_paths(child, path + (path.empty() ? "" : ".") + key, paths);
}

/// Numbers of links and compute for which the cluster gives no reference.
std::vector<std::string> without_source(const ClusterSpec& cluster) {
  const nlohmann::json document = to_json(cluster);
  std::vector<std::string> paths, missing;
  number_paths(document["links"], "links", paths);
  number_paths(document["compute"], "compute", paths);
  for (const std::string& path : paths)
    if (std::none_of(cluster.sources.begin(), cluster.sources.end(), [&](const Reference& reference) {
          return path == reference.key || path.starts_with(reference.key + ".");
        }))
      missing.push_back(path);
  return missing;
}

TEST(ClusterPresets, ReadBackEqual) {
  ASSERT_GE(cluster_presets().size(), 7u);
  for (const ClusterSpec& preset : cluster_presets()) {
    EXPECT_EQ(parse_cluster(json_text(to_json(preset), 1), "f"), preset) << preset.name;
    EXPECT_EQ(find_cluster(preset.name), preset);
    EXPECT_FALSE(preset.description.empty());
  }
}

TEST(ClusterPresets, GiveSourceOfEveryFigure) {
  for (ClusterSpec preset : cluster_presets()) {
    EXPECT_THAT(without_source(preset), testing::IsEmpty()) << preset.name;
    std::erase_if(preset.sources, [](const Reference& reference) { return reference.key == "compute.peak_flops"; });
    EXPECT_THAT(without_source(preset), testing::Not(testing::IsEmpty())) << "the negative control";
  }
}

/// A cluster with every key of the format.
ClusterSpec full_cluster() {
  ClusterSpec cluster = find_cluster("h100-400g");
  cluster.hosts = 128;
  cluster.rack = SwitchSpec{16, 1.5};
  cluster.spine = SwitchSpec{8, 4};
  cluster.sharing = PortSharing::in_order;
  cluster.algorithms["all_reduce"] = "ring:64K-max;tree:0-64K";
  cluster.measured["all_gather"] = {{8, {{1024, 12.5}, {1 << 20, 80.0}}}};
  cluster.measured["all_reduce"] = {{8, {{8, 12.5}}}, {16, {{8, 80.0}}, {{8, 7.5}, {64, 9.0}}, {{8, 31.0}}}};
  cluster.communicators = {{1, 100, 0}, {8, 35456, 131072}};
  cluster.compute.overhead = {{{"fsdp", {{1, 1.5}, {10, 12.5}}}, {"others", {{1, 1.25}}}}, 0.125};
  cluster.compute.kernels = {{"product", "bf16", {{1e9, 1e-5}, {1e12, 2e-3}}}};
  return cluster;
}

TEST(ClusterFile, KeepsEveryField) {
  const ClusterSpec cluster = full_cluster();
  EXPECT_EQ(parse_cluster(json_text(to_json(cluster)), "f"), cluster);
}

TEST(ClusterFile, DefaultsAreThoseOfTheStruct) {
  const ClusterSpec least = parse_cluster(R"({"name": "x", "ranks_per_host": 2, "hosts": 1,
    "links": {"intra": {"latency_us": 1, "bytes_per_second": 1e9}},
    "compute": {"kind": "host", "memory_bytes": 1e9, "memory_bytes_per_second": 1e10, "peak_flops": {"f32": 1e11}}})",
                                          "f");
  ClusterSpec expected{.name = "x", .hosts = 1, .ranks_per_host = 2, .intra = {1, 1e9}};
  expected.compute.memory_bytes = 1e9;
  expected.compute.memory_bytes_per_second = 1e10;
  expected.compute.peak_flops = {{"f32", 1e11}};
  EXPECT_EQ(least, expected);
}

/// The error for the full cluster with one value replaced, or removed if it is null.
std::string error_with(const std::string& pointer, const nlohmann::json& value) {
  nlohmann::json document = to_json(full_cluster());
  const nlohmann::json::json_pointer at(pointer);
  if (value.is_null()) {
    document[at.parent_pointer()].erase(at.back());
  } else {
    document[at] = value;
  }
  return error_of([&] { parse_cluster(json_text(document), "c.json"); });
}

TEST(ClusterFile, ErrorsNameFileKeyAndExpectation) {
  const struct {
    const char* pointer;
    nlohmann::json value;
    const char* expected;
  } kCases[] = {
      {"/links/inter/latency_us", "x", "links.inter.latency_us is \"x\"; needs a number of at least 0"},
      {"/links/inter/latency_us", -1, "links.inter.latency_us is -1; needs a number of at least 0"},
      {"/links/inter/latency_us", nullptr,
       "links.inter has no 'latency_us'; docs/plan.md says what a cluster file needs"},
      {"/links/intra/bytes_per_second", 0, "links.intra.bytes_per_second is 0; needs a number above 0"},
      {"/links/inter", nullptr, "links has no 'inter'; needs the link between hosts, or \"hosts\": 1"},
      {"/links/rack", nullptr, "links.spine joins racks; needs links.rack too"},
      {"/links/rack/oversubscription", 0.5, "links.rack.oversubscription is 0.5; needs a number of at least 1"},
      {"/links/extra", 1, "links.extra is not a known key; known here: inter intra rack spine"},
      {"/name", nullptr, "the document has no 'name'"},
      {"/name", 3, "name is 3; needs a text"},
      {"/hosts", -1, "hosts is -1; needs a whole number from 0 to 1048576"},
      {"/ranks_per_host", 0, "ranks_per_host is 0; needs a whole number from 1"},
      {"/ranks_per_host", 1.5, "ranks_per_host is 1.5; needs a whole number from 1"},
      {"/nics_per_host", 1e30, "nics_per_host is 1e+30; needs a whole number from 1"},
      {"/sharing", "even", "sharing is \"even\"; needs \"fair\" or \"in_order\""},
      {"/algorithms/all_reduce", "circle", "algorithms.all_reduce is \"circle\"; needs nccl or, as in TESSERA_ALGO"},
      {"/algorithms/all_reduce", "ring:64K", "algorithms.all_reduce is \"ring:64K\""},
      {"/algorithms/all_reduce", "ring,all_gather=ring", "algorithms.all_reduce is \"ring,all_gather=ring\""},
      {"/algorithms/all_sum", "ring", "algorithms.all_sum is not an operation"},
      {"/measured/all_gather/points", nlohmann::json::array(), "measured.all_gather.points is empty; needs"},
      {"/measured/all_gather/points/1", {1000, 1}, "measured.all_gather.points[1] is at 1000, not above"},
      {"/measured/all_gather/points/1",
       {2000, -1},
       "measured.all_gather.points[1][1] is -1; needs a number of at least 0"},
      {"/communicators/1/ranks", 1, "communicators has two entries for 1 ranks; needs one"},
      {"/communicators/1/bytes", -1, "communicators[1].bytes is -1; needs"},
      {"/communicators/1/ordinary", 1, "communicators[1].ordinary is "},
      {"/compute/overhead/late", 1.5, "compute.overhead.late is 1.5; needs"},
      {"/compute/overhead/steps/fsdp", 8, "compute.overhead.steps.fsdp is 8; needs"},
      {"/measured/all_reduce/1/ranks", 8, "measured.all_reduce has two tables for 8 ranks; needs one"},
      {"/measured/all_reduce/1/points", 8, "measured.all_reduce[1].points is 8; needs"},
      {"/measured/all_reduce/1/busy", "much", "measured.all_reduce[1].busy is "},
      {"/measured/all_reduce/1/gap", 3, "measured.all_reduce[1].gap is 3; needs"},
      {"/measured/all_reduce", nlohmann::json::array(), "measured.all_reduce is empty; needs a table for"},
      {"/compute", "fast", "compute is \"fast\"; needs an object"},
      {"/compute/kind", "gpu", "compute.kind is \"gpu\"; needs \"host\" or \"device\""},
      {"/compute/memory_bytes", true, "compute.memory_bytes is true; needs a number above 0"},
      {"/compute/peak_flops", nlohmann::json::object(), "compute.peak_flops is empty; needs a number by dtype"},
      {"/compute/peak_flops/f33", 1, "compute.peak_flops.f33 is not a dtype"},
      {"/compute/efficiencies/product", 1.1,
       "compute.efficiencies.product is 1.1; needs a number above 0 and at most 1"},
      {"/compute/kernels/0/dtype", "f33", "compute.kernels[0].dtype is not a dtype"},
      {"/compute/kernels/0/size", 1, "compute.kernels[0].size is not a known key; known here: dtype kernel points"},
      {"/sources/0/source", nullptr, "sources[0] has no 'source'"},
      {"/line\nbreak", 1, "line\\x0abreak is not a known key"},
  };
  for (const auto& [pointer, value, expected] : kCases)
    EXPECT_THAT(error_with(pointer, value), HasSubstr("'c.json': " + std::string(expected))) << pointer;
  EXPECT_EQ(error_with("/hosts", 64), "") << "the negative control";
}

TEST(ClusterFile, ErrorsOfTextNameThePlace) {
  const auto error = [](const char* text) { return error_of([&] { parse_cluster(text, "c.json"); }); };
  EXPECT_EQ(error("{\n \"name\": ,"), "'c.json' is not JSON: line 2, column 10");
  EXPECT_THAT(error(""), HasSubstr("'c.json' is not JSON: line 1"));
  EXPECT_EQ(error("{\"links\": {\"intra\": {}, \"inter\": {}, \"intra\": {}}}"),
            "'c.json' has the key \"intra\" twice in an object");
  EXPECT_THAT(error("{\"links\": {\"intra\": {\"name\": 1}, \"inter\": {\"name\": 1}}}"),
              HasSubstr("the document has no 'name'"));
  EXPECT_EQ(error("[]"), "'c.json': the document is an array; needs an object");
  EXPECT_EQ(error("{\"name\": 1e999}"), "'c.json' has a number that is too large");
  EXPECT_THAT(error_of([] { find_cluster("/no/such"); }), HasSubstr("known: laptop cpu-10gbe"));
}

TEST(ClusterFile, WorldMustHaveRoom) {
  EXPECT_THAT(error_of([] { check_room(find_cluster("laptop"), 5); }), HasSubstr("has room for 4: 1 host of 4 ranks"));
  check_room(find_cluster("laptop"), 4);
  check_room(find_cluster("h100-400g"), 1 << 20);
}

}  // namespace
}  // namespace tessera::tools
