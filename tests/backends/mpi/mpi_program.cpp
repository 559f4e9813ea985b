// A program that uses MPI itself, or can't: mpi_program MODE. Rank 0 prints the events.
#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"

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

/// Creates MPI communicators of this rank alone until MPI has no more. All other MPI errors end the process, as in a
/// program without error handling.
std::vector<MPI_Comm> create_all() {
  std::vector<MPI_Comm> created;
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  for (MPI_Comm one = MPI_COMM_NULL; MPI_Comm_dup(MPI_COMM_SELF, &one) == MPI_SUCCESS;) created.push_back(one);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_ARE_FATAL);
  return created;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const tessera::base::Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
  return "no error";
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("not as expected: " + what);
}

int init_mpi() {
  int level = 0;
  int rank = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

void expect_used_up(const std::string& error) {
  expect(error.starts_with("BackendError: mpi: ") && error.find("can't create another communicator: ") < 40 &&
             error.find('\n') == std::string::npos,
         error);
  // Open MPI's "MPI_ERR_INTERN: internal error", MPICH's "Other MPI error, error stack: ..."
  expect(error.find("MPI_ERR_") != std::string::npos || error.find("MPI error") != std::string::npos, error);
}

#if defined(OPEN_MPI)
/// After that this MPI is not reliable, so the library does not call it any more.
void run_out(const std::string& mode) {
  init_mpi();
  InitOptions config;
  config.deterministic = false;
  const auto world = mode == "exhausted-split" ? init(config) : nullptr;
  const std::vector<MPI_Comm> created = create_all();
  expect_used_up(error_of([&] { world == nullptr ? init() : world->split(0, 0); }));
  if (world != nullptr) expect_used_up(error_of([&] { world->barrier().wait(); }));
  if (world == nullptr) {
    const std::string again = error_of([] { init(); });
    expect(again.starts_with("BackendError: mpi: no new communicator in this process, since an earlier one failed: "),
           again);
  }
}
#else
void free_some(std::vector<MPI_Comm>& created, std::size_t how_many) {
  for (; how_many > 0 && !created.empty(); --how_many, created.pop_back()) MPI_Comm_free(&created.back());
}

/// If MPI has no communicator left for a world, on all ranks or on one, the only effect is an error. After one is
/// freed, a world can be created; its splits do not use MPI's own collectives, and report it if TESSERA_ALGO requests
/// them by name.
void run_out(const std::string& mode) {
  const int rank = init_mpi();
  std::vector<MPI_Comm> created;
  if (rank == 0 || mode != "exhausted-one") created = create_all();
  for (int i = 0; i < 3; ++i) expect_used_up(error_of([] { init(); }));
  free_some(created, 1);
  {
    InitOptions config;
    config.deterministic = false;
    config.algorithms = "all_reduce=native";
    const auto world = init(config);
    expect(sums_are_right(*world), "the last communicator adds wrongly");
    for (int i = 0; i < 3; ++i) {
      const auto without = world->split(0, world->rank());
      const std::string error = error_of([&] { sums_are_right(*without); });
      expect(error.starts_with("Unsupported: all_reduce=native: the library of mpi had no communicator left"), error);
      without->barrier().wait();
    }
    expect(sums_are_right(*world), "the last communicator adds wrongly after a split without");
    free_some(created, 1);
    MPI_Barrier(MPI_COMM_WORLD);
    expect(sums_are_right(*world->split(0, world->rank())), "a split adds wrongly after one was freed");
  }
  free_some(created, created.size());
  MPI_Finalize();
}
#endif

/// A name that is the same on all ranks of one mpirun.
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
  } else if (mode.starts_with("exhausted")) {
    run_out(mode);
  } else if (mode == "twice") {
    for (int i = 0; i < 3; ++i)
      if (!sums_are_right(*init())) return 1;
  } else if (mode == "threads") {
    run_threads(2, {}, [](Communicator&) {});
  } else if (mode == "recovers") {  // from a failure that left all ranks alive; then MPI is fully usable
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
  } else if (mode == "refuses") {  // rank 1 dies, which its launcher is configured to ignore
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
