// The conformance suite with ranks as threads, over a backend that the command line names, for example a module's.
//   conformance_threads BACKEND RANKS [full]      prints errors, and exits with 1 if there are any
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

class Verdict {
 public:
  void add(const std::string& problem) {
    const std::lock_guard lock(mutex_);
    ++cases_;
    if (problem.empty()) return;
    if (wrong_++ == 0) std::fprintf(stderr, "%s\n", problem.c_str());
  }
  int code() const {
    std::printf("%lld cases, %lld wrong\n", cases_, wrong_);
    return wrong_ == 0 && cases_ > 0 ? 0 : 1;
  }

 private:
  std::mutex mutex_;
  long long cases_ = 0, wrong_ = 0;
};

int run(const std::string& backend, int ranks, bool full) {
  InitOptions config;
  config.backend = backend;
  config.timeout = std::chrono::minutes(2);
  Verdict verdict;
  run_threads(ranks, config, [&](Communicator& world) {
    for (const OpKind kind : all_kinds())
      for (const Case& c : cases_for(kind, full, full ? 1 : 7)) verdict.add(run_case(world, c));
    for (const Behaviour& behaviour : behaviours())
      if (ranks >= behaviour.least_ranks) verdict.add(behaviour.run(world));
  });
  return verdict.code();
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
