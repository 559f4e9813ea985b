// A program that uses MPI itself, or can't: mpi_program MODE. Says on rank 0 what happened.
#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/context.h"

namespace {

using namespace tessera::comm;

bool sums_are_right(Communicator& world) {
  std::vector<float> values(50'000, static_cast<float>(world.rank() + 1));
  world.all_reduce(view_of(values.data(), values.size()), view_of(values.data(), values.size()), ReduceOp::sum())
      .wait();
  const auto expected = static_cast<float>(world.size() * (world.size() + 1) / 2);
  return values.front() == expected && values.back() == expected;
}

void use_both() {
  const auto world = init();
  for (int i = 0; i < 20; ++i) {
    std::vector<float> values(1000, 1);
    Work work = world->all_reduce(view_of(values.data(), 1000), view_of(values.data(), 1000), ReduceOp::sum());
    int one = 1;
    int sum = 0;
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    work.wait();
    if (sum != world->size() || values[7] != static_cast<float>(sum)) throw std::runtime_error("wrong sum");
  }
}

/// The same on all ranks of one mpirun.
std::string job() { return std::to_string(::getppid()); }

int run(const std::string& mode) {
  if (mode == "multiple" || mode == "single") {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, mode == "single" ? MPI_THREAD_SINGLE : MPI_THREAD_MULTIPLE, &level);
    try {
      use_both();
    } catch (...) {
      MPI_Finalize();
      throw;
    }
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) throw std::runtime_error("the program's MPI was finalized");
    MPI_Finalize();
  } else if (mode == "finalized") {
    MPI_Init(nullptr, nullptr);
    MPI_Finalize();
    init();
  } else if (mode == "twice") {
    for (int i = 0; i < 3; ++i)
      if (!sums_are_right(*init())) return 1;
  } else if (mode == "threads") {
    run_threads(2, {}, [](Communicator&) {});
  } else if (mode == "recovers") {  // from a failure that left all ranks alive; then MPI is as good as before
    {
      const auto world = init();
      std::vector<float> values(world->rank() == 0 ? 10'000 : 20'000);
      const View view = view_of(values.data(), values.size());
      try {
        world->all_reduce(view, view, ReduceOp::sum()).wait();
        return 1;
      } catch (const tessera::base::Error&) {
      }
    }
    if (!sums_are_right(*init())) return 1;
  } else if (mode == "refuses") {  // rank 1 dies, which its launcher is told not to mind
    auto world = init();
    if (world->rank() == 1) ::_exit(0);
    try {
      while (true) world->barrier().wait();
    } catch (const tessera::base::PeerLost&) {
    }
    const Launch survivors{.launcher = "tessera",
                           .rank = world->rank() / 2,
                           .size = 2,
                           .local_rank = world->rank() / 2,
                           .local_size = 2,
                           .job = "survivors of " + job()};
    world.reset();
    init({.launch = survivors});
  } else {  // "once"
    const auto world = init();
    if (!sums_are_right(*world)) return 1;
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  int code = 3;
  std::string said = "all right";
  try {
    code = run(count > 1 ? arguments[1] : "once");
  } catch (const tessera::base::Error& error) {
    said = std::string(error.kind()) + ": " + error.what();
  } catch (const std::exception& error) {
    said = error.what();
  }
  std::printf("%s\n", said.c_str());
  return code;
}
