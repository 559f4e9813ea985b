// One rank of the conformance suite with ranks as processes. Rank 0 prints one line of JSON for each operation and
// behavior. Exits with 1 on any error.
//   conformance_ranks [full | huge | ipc | staged]      under any launcher; the backend is TESSERA_BACKEND
// ipc, staged: a part of the suite in device memory; ipc requires that some operations use IPC, staged that none does.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tests/conformance/cases.h"
#include "tests/harness/guarded_device.h"

namespace tessera::conformance {
namespace {

struct Tally {
  std::int64_t cases = 0;
  std::int64_t wrong = 0;
  std::string first;
  void add(const std::string& problem) {
    ++cases;
    if (problem.empty()) return;
    if (wrong++ == 0) first = problem;
  }
};

/// Sums the tallies of all ranks and prints them. True: no errors.
bool report(Communicator& world, const std::string& what, const Tally& tally) {
  std::int64_t sums[2] = {tally.cases, tally.wrong};
  world.all_reduce(view_of(sums, 2), view_of(sums, 2), ReduceOp::sum()).wait();
  if (!tally.first.empty()) std::fprintf(stderr, "%s\n", tally.first.c_str());
  if (world.rank() == 0)
    std::printf("{\"what\": \"%s\", \"cases\": %lld, \"wrong\": %lld}\n", what.c_str(), static_cast<long long>(sums[0]),
                static_cast<long long>(sums[1]));
  std::fflush(stdout);
  return sums[1] == 0;
}

/// Runs one case beyond 2^31 bytes for each operation.
bool run_huge_cases(Communicator& world) {
  bool good = true;
  for (const OpKind kind : all_kinds()) {
    Tally tally;
    tally.add(run_huge(world, kind));
    good &= report(world, std::string(name_of(kind)), tally);
  }
  return good;
}

/// Runs cases in memory of a device that the host can't access and that is as late as a GPU may be.
bool run_on_a_device(Communicator& world, DeviceRuntime& device, bool by_ipc) {
  const auto stream = device.make_stream();
  const OnDevice where{device, *stream};
  const auto pair = world.split(world.rank() / 2, world.rank());
  bool good = true;
  Tally algorithm;
  std::int64_t went = 0;
  for (const OpKind kind : all_kinds()) {
    Tally tally;
    for (Communicator* comm : {&world, pair.get()})
      for (const Case& c : cases_for(kind, false, 13)) {
        if (c.count > 100'000) continue;  // more chunks, no new cases
        tally.add(run_case(*comm, c, &where));
        went += comm->last_algorithm() == "ipc" ? 1 : 0;
      }
    good &= report(world, std::string(name_of(kind)), tally);
  }
  algorithm.add((went > 0) == by_ipc ? "" : std::to_string(went) + " calls went by IPC");
  return report(world, "the algorithm", algorithm) && good;
}

bool run(Communicator& world, bool full) {
  constexpr int kWorlds[] = {1, 2, 3, 4, 5, 8};
  bool good = true;
  std::vector<std::unique_ptr<Communicator>> parts;
  for (const int ranks : kWorlds)
    if (ranks <= world.size()) parts.push_back(world.split(world.rank() < ranks ? 0 : -1, world.rank()));
  for (const OpKind kind : all_kinds()) {
    Tally tally;
    for (const auto& part : parts) {
      if (part != nullptr)
        for (const Case& c : cases_for(kind, full, full ? 1 : 7)) tally.add(run_case(*part, c));
      world.barrier().wait();
    }
    good &= report(world, std::string(name_of(kind)), tally);
  }
  for (const Behaviour& behaviour : behaviours()) {
    Tally tally;
    if (world.size() >= behaviour.least_ranks) tally.add(behaviour.run(world));
    good &= report(world, std::string(behaviour.name), tally);
  }
  return good;
}

}  // namespace
}  // namespace tessera::conformance

int main(int argc, char** argv) {
  const auto named = [&](const char* word) {
    return std::any_of(argv + 1, argv + argc, [&](const char* arg) { return std::strcmp(arg, word) == 0; });
  };
  try {
    using namespace tessera::conformance;
    if (named("ipc") || named("staged")) {
      tessera::comm::InitOptions config;
      const auto device = tessera::harness::make_guarded_device({.lazy = true});
      config.device = device;
      const auto world = tessera::comm::init(config);
      return run_on_a_device(*world, *device, named("ipc")) ? 0 : 1;
    }
    const auto world = tessera::comm::init();
    return (named("huge") ? run_huge_cases(*world) : run(*world, named("full"))) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return dynamic_cast<const tessera::base::InvalidUsage*>(&error) != nullptr ? 2 : 1;
  }
}
