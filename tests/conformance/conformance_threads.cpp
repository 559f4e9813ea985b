// The conformance suite with ranks as threads, over a backend that the command line names, for example a module's.
//   conformance_threads BACKEND RANKS [full]      prints the number of cases; at the first error prints it and exits
//                                                 with 1: the ranks of a backend that loses data may wait forever
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

int run(const std::string& backend, int ranks, bool full) {
  InitOptions config;
  config.backend = backend;
  config.timeout = std::chrono::minutes(2);
  std::atomic<std::int64_t> cases = 0;
  const auto require_none = [&](const std::string& problem) {
    if (!problem.empty()) throw std::runtime_error(problem);  // stops the other ranks
    ++cases;
  };
  run_threads(ranks, config, [&](Communicator& world) {
    for (const OpKind kind : all_kinds())
      for (const Case& c : cases_for(kind, full, full ? 1 : 7)) require_none(run_case(world, c));
    for (const Behaviour& behaviour : behaviours())
      if (ranks >= behaviour.least_ranks) require_none(behaviour.run(world));
  });
  std::printf("%lld cases\n", static_cast<long long>(cases.load()));
  return cases > 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::conformance

int main(int count, char** arguments) {
  if (count < 3) return 2;
  try {
    return tessera::conformance::run(arguments[1], std::stoi(arguments[2]),
                                     count > 3 && std::strcmp(arguments[3], "full") == 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
