// A rank of the tests that need real processes. Prints events to standard output, one a line.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <locale>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/rendezvous.h"
#include "tessera/comm/init.h"
#include "tessera/comm/launch.h"
#include "tests/comm/mixed_memory.h"
#include "tests/harness/guarded_device.h"

namespace {

using namespace tessera::comm;
using tessera::base::MemoryCategory;

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

constexpr std::size_t kCount = 300'000;

/// Sequences of random operations on mixed memory.
#ifdef __SANITIZE_THREAD__
constexpr unsigned kMixedSeeds = 1;  // under this sanitizer an element costs 20 times as much
#else
constexpr unsigned kMixedSeeds = 3;
#endif

/// One all_reduce in a window and one in ordinary memory; both are checked.
void round_of_sums(Communicator& comm, float* window, std::vector<float>& ordinary) {
  const auto expected = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
  for (float* x : {window, ordinary.data()}) {
    std::fill_n(x, kCount, static_cast<float>(comm.rank() + 1));
    comm.all_reduce(view_of(x, kCount), view_of(x, kCount), ReduceOp::sum()).wait();
    for (std::size_t i = 0; i < kCount; ++i)
      if (x[i] != expected) throw std::runtime_error("wrong sum");
  }
}

std::string error_of(Work& work) {
  try {
    work.wait();
  } catch (const tessera::base::Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
  return "no error";
}

/// Rank 1 passes ordinary memory to an operation with rank 0, fails, and frees the memory; only then does a line on
/// standard input let rank 0 start its side. Every rank prints its error. `mode`: let go PART WHY.
int let_go(Communicator& comm, const std::string& mode) {
  constexpr std::size_t kBytes = 8 << 20;
  const bool message = mode.find("message") != std::string::npos;
  const bool impatient = mode.find("timeout") != std::string::npos;
  void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  std::fill_n(static_cast<char*>(memory), kBytes, 'x');
  const View mine = view_of(static_cast<std::uint8_t*>(memory), kBytes);
  std::vector<std::uint8_t> all(kBytes * static_cast<std::size_t>(comm.size()));
  OpOptions options;
  if (impatient && comm.rank() == 1) options.timeout = std::chrono::milliseconds(300);
  if (comm.rank() == 0) std::getchar();
  Work work;
  if (!message) {
    work = comm.all_gather(mine, view_of(all.data(), all.size()), options);
  } else if (comm.rank() == 0) {
    work = comm.recv(mine, 1, options);
  } else {
    work = comm.send(mine, 0, options);
  }
  if (comm.rank() == 1 && mode.find("abort") != std::string::npos) comm.abort("enough");
  if (comm.rank() == 2) say("called");  // the test then kills it
  const std::string error = error_of(work);
  ::munmap(memory, kBytes);
  say(error);
  std::getchar();  // stays alive, so that its memory is unreadable, not its process gone
  return 3;
}

/// Where this process maps the ranks' windows: address bits 21 to 27, one number per window.
std::string window_colors() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  std::string colors;
  while (std::getline(maps, line))
    if (line.find("tessera-window") != std::string::npos)
      colors += (colors.empty() ? "" : " ") + std::to_string(std::stoull(line, nullptr, 16) >> 21 & 127);
  return colors;
}

/// Starts with closed standard streams, and says where it would print, through a copy of standard output.
int run_with_closed_streams() {
  const int out = ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 100);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(stream);
  std::string text;
  {
    const auto comm = init();
    for (const char* stream : {"0", "1", "2"})
      text += std::filesystem::read_symlink(std::string("/proc/self/fd/") + stream).string() + " ";
    for (int step = 0; step < 40; ++step) {
      std::printf("step %d loss 1.234567, a line as programs print them\n", step);
      std::fflush(stdout);
    }
    float x = 1;
    comm->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
    text += x == static_cast<float>(comm->size()) ? "right\n" : "wrong\n";
  }
  return ::write(out, text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1;
}

/// The first communicator is destroyed by exit(), also in a child.
std::unique_ptr<Communicator> global;

/// Children that end in every way, also with an operation in flight, do nothing to the world of their parent.
int fork_children() {
  global = init();
  float x = 1;
  const View view = view_of(&x, 1);
  Work work = global->recv(view, (global->rank() + 1) % 2);
  for (const int way : {0, 1, 2}) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        if (way == 1) global->barrier().wait();
        if (way == 2) global->abort("by a child");
        if (way == 2) work = Work();  // which does not wait here
      } catch (const tessera::base::InvalidUsage&) {
        std::exit(way);
      }
      std::exit(way == 1 ? 0 : way);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != way) say("child " + std::to_string(status));
  }
  float mine = 1;
  global->send(view_of(&mine, 1), (global->rank() + 1) % 2).wait();
  work.wait();
  for (int round = 0; round < 100; ++round) global->all_reduce(view, view, ReduceOp::max()).wait();
  say(x == 1 ? "right" : "wrong");
  return 0;
}

/// Rank 1 has a locale that writes 1,234 for 1234, as those of many countries do.
int use_other_locale(bool groups) {
  struct Grouping final : std::numpunct<char> {
    std::string do_grouping() const override { return "\3"; }
  };
  if (groups) std::locale::global(std::locale(std::locale::classic(), new Grouping));
  const auto comm = init();
  float x = 1;
  comm->split(0, 0)->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
  say(x == static_cast<float>(comm->size()) ? "right" : "wrong");
  return 0;
}

/// Ends with communicators that are never destroyed.
[[noreturn]] void exit_in_use() {
  const auto comm = init();
  const auto part = comm->split(0, comm->rank());
  float x = 1;
  for (Communicator* const each : {comm.get(), part.get()})
    each->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
  say(x == static_cast<float>(comm->size() * comm->size()) ? "right" : "wrong");
  // A peer that has not yet seen the end of the call would find this rank dead.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::exit(0);
}

/// A signal that the program takes by sigwait() reaches it, and no thread of the library.
int take_signal() {
  const auto comm = init();
  comm->barrier().wait();
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::kill(::getpid(), SIGUSR1);
  const timespec time{10, 0};
  say(::sigtimedwait(&signals, nullptr, &time) == SIGUSR1 ? "right" : "no signal came");
  comm->barrier().wait();
  return 0;
}

/// Rank 0 sums until a signal handler aborts, which mostly interrupts it while it holds the lock of its polls.
int abort_in_handler() {
  global = init();
  ::signal(SIGUSR1, [](int) { global->abort("signal"); });
  global->barrier().wait();
  say("ready");
  float x = 1;
  while (true) global->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::max()).wait();
}

/// "limit BYTES": of file sizes, beyond which the kernel ends a process.
int run_below_limit(const std::string& bytes) {
  rlimit limit = {};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = std::stoull(bytes);
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const auto comm = init();
  float x = 1;
  comm->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
  say(x == static_cast<float>(comm->size()) ? "right" : "wrong");
  return 0;
}

/// All-reduces device memory, forever or for `rounds` rounds. A stream that waits for a failed operation continues, and
/// its memory holds no partial result later.
void sums_on_a_device(Communicator& comm, tessera::base::DeviceRuntime& device, int rounds = 1'000'000'000) {
  const auto stream = device.make_stream();
  const tessera::base::Buffer memory = comm.allocate(kCount * 4, MemoryKind::device, MemoryCategory::other);
  auto* const x = static_cast<float*>(memory.data());
  const View view{x, kCount, tessera::base::DType::f32, device.device()};
  const auto total = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
  for (int round = 0; round < rounds; ++round) {
    stream->run([=, mine = static_cast<float>(comm.rank() + 1)] { std::fill_n(x, kCount, mine); });
    Work work = comm.all_reduce(view, view, ReduceOp::sum(), {.after = stream.get()});
    work.wait_on(*stream);
    bool right = false;
    stream->run(
        [&right, x, total] { right = std::count(x, x + kCount, total) == static_cast<std::ptrdiff_t>(kCount); });
    stream->synchronize();
    work.wait();
    if (!right) throw std::runtime_error("wrong sum on the device");
    if (round == 2) say("ready " + std::string(comm.last_algorithm()));
  }
}

/// MODE of "device MODE": "ipc" and "direct" (staged) sum forever; "leave" and "throw" end and print the number of
/// exported and imported blocks.
int run_on_a_device(InitOptions config, const std::string& mode) {
  const auto device = tessera::harness::make_guarded_device({.lazy = true});
  config.device = device;
  config.device_ipc = mode != "direct";
  struct AtTheEnd {
    const tessera::base::DeviceRuntime& device;
    ~AtTheEnd() {
      const tessera::harness::GuardedSharing open = tessera::harness::sharing_of(device);
      say("exported " + std::to_string(open.exported) + ", imported " + std::to_string(open.imported) + " of " +
          std::to_string(open.imports) + ", freed too early " + std::to_string(open.freed_too_early));
    }
  };
  if (mode == "ipc" || mode == "direct") {
    const auto comm = init(config);
    sums_on_a_device(*comm, *device);
  }
  const AtTheEnd at_the_end{*device};
  const auto comm = init(config);
  sums_on_a_device(*comm, *device, 2);
  say("right");
  if (mode == "throw" && comm->rank() == 1) throw std::runtime_error("mine");
  return 0;
}

/// Rank 1 is rank 0 of a group in reversed order, and nobody can read what it sends.
int send_unreadable(Communicator& comm) {
  const auto reversed = comm.split(0, -comm.rank());
  constexpr std::size_t kMany = 16'000'000;  // of fewer, the sender makes a copy
  void* const hidden = ::mmap(nullptr, kMany * 4, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::vector<float> in(kMany);
  std::vector<float> out(2 * kMany);
  float* const from = reversed->rank() == 0 ? static_cast<float*>(hidden) : in.data();
  Work work = reversed->gather(view_of(from, kMany), view_of(out.data(), out.size()), 1);
  say(error_of(work));
  return 0;
}

/// TEST_FAN_OUT: in a tree in which the ranks forward each other's control messages, as in large worlds.
std::unique_ptr<Communicator> start(const InitOptions& config) {
  const std::string fan_out = tessera::base::read_foreign_env("TEST_FAN_OUT").value_or("");
  if (fan_out.empty()) return init(config);
  const std::string timeout = tessera::base::read_foreign_env("TESSERA_TIMEOUT").value_or("20s");
  return make_world(rendezvous({.launch = resolve_launch(),
                                .timeout = tessera::base::parse_duration(timeout, "TESSERA_TIMEOUT"),
                                .largest_star = 1,
                                .tree_fan_out = std::stoi(fan_out)}),
                    config);
}

int run(const std::string& mode) {
  InitOptions config;
  if (mode == "closed") return run_with_closed_streams();
  if (mode == "fork") return fork_children();
  if (mode == "handler") return abort_in_handler();
  if (mode == "locale") return use_other_locale(resolve_launch().rank == 1);
  if (mode == "signal") return take_signal();
  if (mode == "abandon") exit_in_use();
  if (mode.starts_with("limit ")) return run_below_limit(mode.substr(6));
  if (mode.starts_with("device ")) return run_on_a_device(std::move(config), mode.substr(7));
  const auto comm = start(config);
  if (mode == "mixed") {
    for (unsigned seed = 1; seed <= kMixedSeeds; ++seed) tessera::comm_test::move_mixed_memory(*comm, seed, 60);
    say("right");
    return 0;
  }
  if (mode == "windows") {
    say(window_colors());
    comm->barrier().wait();
    return 0;
  }
  if (mode.starts_with("let go")) return let_go(*comm, mode);
  if (mode == "unreadable") return send_unreadable(*comm);
  tessera::base::Buffer window = comm->allocate(kCount * 4, MemoryKind::host, MemoryCategory::other);
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

/// Leaves by exit() with a communicator that nothing destroys; what is left of the process goes on for a while.
[[noreturn]] void exit_with_communicator() {
  std::atexit([] { std::this_thread::sleep_for(std::chrono::seconds(2)); });  // runs after the handlers of libraries
  auto* const comm = init().release();
  comm->barrier().wait();
  say("ready");
  std::getchar();
  say("exits");
  std::exit(0);
}

int main(int count, char** arguments) {
  try {
    if (count > 1 && std::string_view(arguments[1]) == "exit") exit_with_communicator();
    return run(count > 1 ? arguments[1] : "once");
  } catch (const tessera::base::Error& error) {
    say(std::string(error.kind()) + ": " + error.what());
  } catch (const std::exception& error) {
    say(std::string("other: ") + error.what());
  }
  return 3;
}
