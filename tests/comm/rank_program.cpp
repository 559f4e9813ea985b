// A rank of the tests that need real processes. Says what happens on standard output, a line at a time.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/context.h"

namespace {

using namespace tessera::comm;
using tessera::base::MemoryUse;

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

constexpr std::size_t kCount = 300'000;

/// One all_reduce in a window and one in ordinary memory, checked.
void round_of_sums(Communicator& comm, float* window, std::vector<float>& ordinary) {
  const auto expected = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
  for (float* x : {window, ordinary.data()}) {
    std::fill_n(x, kCount, static_cast<float>(comm.rank() + 1));
    comm.all_reduce(view_of(x, kCount), view_of(x, kCount), ReduceOp::sum()).wait();
    for (std::size_t i = 0; i < kCount; ++i)
      if (x[i] != expected) throw std::runtime_error("wrong sum");
  }
}

int run(const std::string& mode) {
  const auto comm = init();
  tessera::base::Buffer window = comm->allocate(kCount * 4, MemoryKind::host, MemoryUse::other);
  std::vector<float> ordinary(kCount);
  round_of_sums(*comm, static_cast<float*>(window.data()), ordinary);
  const auto half = comm->split(comm->rank() % 2, 0);
  round_of_sums(*half, static_cast<float*>(window.data()), ordinary);
  comm->barrier().wait();
  say("ready");
  if (mode == "once") return 0;
  if (mode == "idle" && comm->rank() == 0) {
    std::string line;
    while (std::getchar() != EOF) {
    }
  }
  while (true) round_of_sums(*comm, static_cast<float*>(window.data()), ordinary);
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(count > 1 ? arguments[1] : "once");
  } catch (const tessera::base::Error& error) {
    say(std::string(error.kind()) + ": " + error.what());
  } catch (const std::exception& error) {
    say(std::string("other: ") + error.what());
  }
  return 3;
}
