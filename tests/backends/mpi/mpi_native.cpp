// One rank of the tests of MPI's own collectives, the algorithm `native`: mpi_native MODE. Prints events, one a line.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/mpi/link.h"
#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/rendezvous.h"
#include "tessera/comm/host_communicator.h"
#include "tessera/comm/init.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/native_collectives.h"
#include "tests/backends/mpi/wrong_collectives.h"
#include "tests/conformance/cases.h"

namespace {

using namespace tessera::comm;
using namespace tessera::conformance;
using namespace tessera::mpi_test;
using namespace std::chrono_literals;

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

std::string all_native() {
  std::string table;
  for (const OpKind kind : native_kinds()) {
    if (!table.empty()) table += ",";
    table.append(name_of(kind)).append("=native");
  }
  return table;
}

InitOptions config(std::string algorithms, bool check = false) {
  InitOptions made;
  made.deterministic = false;
  made.check = check;
  made.algorithms = std::move(algorithms);
  return made;
}

/// Runs cases of the conformance suite, each with MPI's own collective.
void run_cases(Communicator& world, std::size_t stride) {
  for (const OpKind kind : all_kinds())
    for (const Case& c : cases_for(kind, false, stride)) {
      const std::string wrong = run_case(world, c);
      require(wrong.empty(), wrong);
      require(world.last_algorithm() == kNativeAlgorithm, c.name(world.size()) + ": not native");
    }
}

template <class T>
View all_of(std::vector<T>& values) {
  return view_of(values.data(), values.size());
}

/// Runs cases, an average whose divisor is not the number of ranks, and operations in flight on several communicators.
void cases(bool check) {
  const auto world = init(config(all_native(), check));
  const auto& known = world->capabilities().algorithms;
  require(std::find(known.begin(), known.end(), "all_reduce=native") != known.end(), "not among the algorithms");
  run_cases(*world, check ? 13 : 3);
  const auto same = world->split(0, world->rank());
  run_cases(*same, 23);
  std::vector<tessera::base::bf16> values(5000, tessera::base::bf16(6.0F * static_cast<float>(world->rank() + 1)));
  world->all_reduce(all_of(values), all_of(values), ReduceOp::average_over(3)).wait();
  require(static_cast<float>(values.back()) == static_cast<float>(world->size() * (world->size() + 1)),
          "average_over is wrong");
  world->barrier().wait();
  require(world->last_algorithm() == kNativeAlgorithm, "barrier: not native");
  for (const Behaviour& behaviour : behaviours()) {
    const bool supports_all = behaviour.name == "opposite order" || behaviour.name == "waited out of order" ||
                              behaviour.name == "traffic is counted" || behaviour.name == "a waiter delays no rank";
    if (!supports_all) continue;
    const std::string wrong = behaviour.run(*world);
    require(wrong.empty(), std::string(behaviour.name) + ": " + wrong);
  }
}

using Wrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

/// Creates a world with this program's own transport. `generation` must increase with each world.
std::unique_ptr<Communicator> own_world(int generation, std::size_t max_chunk, const Wrap& wrap,
                                        std::chrono::milliseconds timeout = 120s) {
  BackendOptions options;
  options.deterministic = false;
  options.algorithms = all_native();
  options.communicator.timeout = timeout;
  Launch launch = resolve_launch();
  launch.generation = generation;
  auto bootstrap = rendezvous({.launch = launch, .timeout = 30s, .master = {}, .token = {}, .host_id = {}});
  return make_host_communicator(
      std::move(bootstrap), options, "mpi",
      [&](Bootstrap& ranks, TransportEvents& events, const BackendOptions&) {
        auto transport = tessera::comm::mpi::make_transport(ranks, events, 30s, max_chunk);
        return wrap ? wrap(std::move(transport)) : std::move(transport);
      },
      native_kinds());
}

/// Negative control of the cases: the comparison detects another arithmetic, operation and count.
void control() {
  const auto world = own_world(0, tessera::comm::mpi::kMaxChunk, with_collectives<WrongCollectives>);
  const auto seen = [&](OpKind kind, DType dtype, ReduceOp::Kind reduce) {
    return !run_case(*world, {kind, dtype, reduce, 1021, false, false, false, 5}).empty();
  };
  require(!seen(OpKind::all_reduce, DType::f16, ReduceOp::Kind::sum), "what is right is called wrong");
  require(seen(OpKind::all_reduce, DType::bf16, ReduceOp::Kind::sum), "another type's sum is not seen");
  require(seen(OpKind::reduce_scatter, DType::bf16, ReduceOp::Kind::avg), "another type's average is not seen");
  require(seen(OpKind::all_reduce, DType::i32, ReduceOp::Kind::sum), "max instead of sum is not seen");
  require(seen(OpKind::all_gather, DType::u8, ReduceOp::Kind::sum), "a part that is too short is not seen");
}

/// Each rank sends its own numbers to the next rank.
void exchange_around(Communicator& world, std::size_t count) {
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  std::vector<float> out(count);
  std::vector<float> in(count, -1);
  std::iota(out.begin(), out.end(), static_cast<float>(world.rank()));
  auto sent = world.send(all_of(out), next);
  world.recv(all_of(in), previous).wait();
  sent.wait();
  std::iota(out.begin(), out.end(), static_cast<float>(previous));
  require(in == out, "a message of several pieces came differently");
}

/// Limits the bytes of one MPI call so that most operations need several calls.
void chunks() {
  int generation = 0;
  for (const std::size_t longest : {std::size_t{1000}, std::size_t{100'000}}) {
    const auto world = own_world(generation++, longest, {});
    run_cases(*world, longest < 50'000 ? 31 : 9);
    exchange_around(*world, 300'000);
  }
}

/// Which communicators use `native`, and what the others report.
void choice() {
  {
    const auto world = init(config(""));
    std::vector<float> values(100'000, 1);
    const auto algorithm_of = [&](Communicator& comm) {
      comm.broadcast(all_of(values), all_of(values), 0).wait();
      return comm.last_algorithm();
    };
    require(algorithm_of(*world) == kNativeAlgorithm, "the world: not native");
    require(algorithm_of(*world->split(0, world->rank())) == kNativeAlgorithm, "the same ranks: not native");
    require(algorithm_of(*world->split(0, -world->rank())) != kNativeAlgorithm, "another order: native");
    const auto some = world->split(world->rank() == 0 ? 0 : 1, 0);
    if (some->size() > 1) require(algorithm_of(*some) != kNativeAlgorithm, "some ranks: native");
    for (int i = 0; i < 3000; ++i) world->split(0, 0);  // dropped communicators are freed: MPICH has 2048 of them
    require(algorithm_of(*world->split(0, world->rank())) == kNativeAlgorithm, "after many splits: not native");
  }
  {
    const auto world = init(config("broadcast=direct"));
    std::vector<float> values(100'000, 1);
    world->broadcast(all_of(values), all_of(values), 0).wait();
    require(world->last_algorithm() == "direct", "TESSERA_ALGO=broadcast=direct: not direct");
    world->barrier().wait();
  }
  const auto world = init(config(all_native()));
  const auto some = world->split(world->rank() == 0 ? 0 : 1, 0);
  std::vector<float> values(1000, 1);
  try {
    some->all_reduce(all_of(values), all_of(values), ReduceOp::sum()).wait();
    require(some->size() == 1, "some ranks: not refused");
  } catch (const tessera::base::InvalidUsage& refused) {
    require(std::string(refused.what()).find("all_reduce=native needs a communicator of all ranks") == 0,
            refused.what());
  }
  world->barrier().wait();
}

/// Rank 0 calls another operation: in checked mode no rank enters MPI with it.
void mismatch() {
  const auto world = init(config(all_native(), true));
  std::vector<float> values(10'000, 1);
  std::vector<float> all(10'000 * static_cast<std::size_t>(world->size()), 7);
  try {
    if (world->rank() == 0) {
      world->all_gather(all_of(values), all_of(all)).wait();
    } else {
      world->all_reduce(all_of(values), all_of(values), ReduceOp::sum()).wait();
    }
  } catch (const tessera::base::Mismatch& error) {
    require(std::string(error.what()).find("all_gather of") != std::string::npos, error.what());
    require(values == std::vector<float>(10'000, 1) && all.front() == 7, "the buffers were written");
    return;
  }
  require(false, "no Mismatch");
}

/// Repeats a sum until it fails. Afterwards the buffers stay unchanged, whatever the other ranks do, and other
/// communicators report why they can't continue. `unstopped` is the negative control: MPI continues canceled
/// operations.
void failing(bool unstopped) {
  std::signal(SIGUSR1, SIG_IGN);  // MPICH's launcher sends it when a rank has died
  std::signal(SIGUSR2, [](int) { ::_exit(0); });
  const auto world = unstopped ? own_world(0, tessera::comm::mpi::kMaxChunk, with_collectives<UnstoppedCollectives>, 3s)
                               : init(config(all_native()));
  const auto other = world->split(0, world->rank());
  std::vector<float> in(4'000'000, 1);
  std::vector<float> out(in.size());
  const auto call = [&] { return world->all_reduce(all_of(in), all_of(out), ReduceOp::sum()); };
  call().wait();
  say("ready");
  try {
    while (true) call().wait();
  } catch (const tessera::base::Error& error) {
    say(std::string(error.kind()) + ": " + error.what());
  }
  std::fill(out.begin(), out.end(), -1.0F);
  try {
    other->barrier().wait();
    say("other: no failure");
  } catch (const tessera::base::Error& error) {
    say("other: " + std::string(error.kind()) + ": " + error.what());
  }
  std::this_thread::sleep_for(2s);  // meanwhile the stopped rank resumes
  say(std::all_of(out.begin(), out.end(), [](float x) { return x == -1; }) ? "untouched" : "written");
}

int run(const std::string& mode) {
  if (mode == "cases" || mode == "checked") {
    cases(mode == "checked");
  } else if (mode == "pieces") {
    chunks();
  } else if (mode == "control") {
    control();
  } else if (mode == "choice") {
    choice();
  } else if (mode == "mismatch") {
    mismatch();
  } else if (mode == "failing" || mode == "unstopped") {
    failing(mode == "unstopped");
    return 3;
  } else {
    return 2;
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const int code = run(count > 1 ? arguments[1] : "cases");
    if (code == 0) say("all right");
    return code;
  } catch (const tessera::base::Error& error) {
    say(std::string(error.kind()) + ": " + error.what());
  } catch (const std::exception& error) {
    say(error.what());
  }
  return 1;
}
