// The TCP transport between two ranks that are threads: the one-way latency of small messages and the bandwidth of
// large ones. Compare with `iperf3 -s -1 & iperf3 -c 127.0.0.1` on the same machine.
//
//   bench_tcp_transport [STREAMS ...]        default: 1 2 4
//   bench_tcp_transport latency RANKS        of a ring of messages among more ranks
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/tcp/transport.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"

namespace {

using namespace tessera::comm;
using tessera::comm::tcp::TcpTransport;
using Seconds = std::chrono::duration<double>;

struct Counter final : MessageOwner, TransportEvents {
  void message_done(Message&, std::size_t) noexcept override { ++done; }
  void connection_lost(int peer, const std::string& why) noexcept override {
    std::fprintf(stderr, "rank %d is lost: %s\n", peer, why.c_str());
    std::exit(1);
  }
  void message_damaged(int peer, const std::string& what, bool) noexcept override {
    std::fprintf(stderr, "a message of rank %d came damaged: %s\n", peer, what.c_str());
    std::exit(1);
  }
  void transport_failed(const std::string& why) noexcept override {
    std::fprintf(stderr, "%s\n", why.c_str());
    std::exit(1);
  }
  std::size_t done = 0;
};

struct Rank {
  Counter counter;
  std::unique_ptr<TcpTransport> transport;
  std::uint32_t next_tag = 0;
  bool crowded = false;  // more ranks than cores

  /// Waits as the library's progress engine does: spins, then yields, then sleeps.
  void until(std::size_t done) {
    Clock::time_point idle_since = Clock::now();
    for (std::uint32_t turn = 1; counter.done < done; ++turn) {
      const bool moved = transport->poll(turn % 256 == 0);
      if (moved || (turn % 32 != 0 && !crowded)) {
        if (moved && turn % 16 == 0) idle_since = Clock::now();
        continue;
      }
      const auto idle = Clock::now() - idle_since;
      if (idle < std::chrono::microseconds(20) && !crowded) continue;
      if (idle < std::chrono::microseconds(60)) {
        std::this_thread::yield();
        continue;
      }
      if (!transport->poll(true) && transport->waiter().arm())
        transport->waiter().sleep(std::chrono::milliseconds(100));
      idle_since = Clock::now() - std::chrono::microseconds(20);
    }
  }
  Message message(std::byte* data, std::size_t bytes, int peer, std::uint32_t number) {
    Message m;
    m.data = data;
    m.bytes = bytes;
    m.peer = peer;
    m.tag = {1, number, 0};
    m.owner = &counter;
    return m;
  }
};

/// Passes a message around all ranks; returns seconds per hop, the best of several tries.
double ring_latency(Rank& self, int rank, int ranks, std::size_t bytes) {
  std::vector<std::byte> out(bytes), in(bytes);
  double best = 1;
  for (int attempt = 0; attempt < 20; ++attempt) {
    constexpr int kRounds = 500;
    const auto start = Clock::now();
    for (int i = 0; i < kRounds; ++i) {
      const std::uint32_t tag = self.next_tag++;
      Message in_message = self.message(in.data(), bytes, (rank + ranks - 1) % ranks, tag);
      Message out_message = self.message(out.data(), bytes, (rank + 1) % ranks, tag);
      const std::size_t before = self.counter.done;
      self.transport->receive(in_message);
      if (rank == 0) self.transport->send(out_message);
      if (rank != 0) self.until(before + 1);
      if (rank != 0) self.transport->send(out_message);
      self.until(before + 2);
    }
    best = std::min(best, Seconds(Clock::now() - start).count() / kRounds / ranks);
  }
  return best;
}

/// Sends from rank 0 to rank 1, four messages at a time; returns the best of several tries.
double bandwidth(Rank& self, int rank, std::size_t bytes) {
  constexpr int kWindow = 4;
  std::vector<std::vector<std::byte>> buffers(kWindow, std::vector<std::byte>(bytes));
  const int count = static_cast<int>(std::clamp<std::size_t>((256 << 20) / bytes, 8, 4096)) / kWindow * kWindow;
  double best = 0;
  for (int attempt = 0; attempt < 7; ++attempt) {
    std::vector<Message> messages;
    std::byte acknowledged{};
    const std::size_t before = self.counter.done;
    for (int i = 0; i < count; ++i)
      messages.push_back(
          self.message(buffers[static_cast<std::size_t>(i % kWindow)].data(), bytes, 1 - rank, self.next_tag++));
    Message acknowledge = self.message(&acknowledged, 1, 1 - rank, self.next_tag++);
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) {
      if (i >= kWindow) self.until(before + static_cast<std::size_t>(i - kWindow + 1));
      rank == 0 ? self.transport->send(messages[static_cast<std::size_t>(i)])
                : self.transport->receive(messages[static_cast<std::size_t>(i)]);
    }
    self.until(before + static_cast<std::size_t>(count));
    rank == 0 ? self.transport->receive(acknowledge) : self.transport->send(acknowledge);
    self.until(before + static_cast<std::size_t>(count) + 1);
    best = std::max(best, static_cast<double>(bytes) * count / Seconds(Clock::now() - start).count());
  }
  return best;
}

void run_rank(Bootstrap& bootstrap, int streams, bool latency_only) {
  Rank self;
  BackendOptions options;
  tessera::comm::tcp::TcpOptions settings;
  settings.streams = streams;
  self.crowded = static_cast<unsigned>(bootstrap.size()) > std::thread::hardware_concurrency();
  self.transport = make_transport(bootstrap, self.counter, options, settings);
  const int rank = bootstrap.rank();
  for (const std::size_t bytes : {8, 1024, 16384, 65536}) {
    const double time = ring_latency(self, rank, bootstrap.size(), bytes);
    if (rank == 0) std::printf("  %8zu B   %7.2f us one way\n", bytes, time * 1e6);
  }
  for (std::size_t bytes = 64 << 10; bytes <= 64 << 20 && !latency_only; bytes *= 4) {
    const double rate = bandwidth(self, rank, bytes);
    if (rank == 0) std::printf("  %8zu B   %7.2f Gbit/s\n", bytes, rate * 8e-9);
  }
  self.transport->close(false);
}

void run(int ranks, int streams, bool latency_only) {
  std::printf("%d ranks, %d connections\n", ranks, streams);
  std::fflush(stdout);
  const auto bootstraps = make_thread_bootstraps(ranks, std::chrono::minutes(1));
  std::vector<std::thread> threads;
  for (const auto& bootstrap : bootstraps)
    threads.emplace_back([bootstrap, streams, latency_only] { run_rank(*bootstrap, streams, latency_only); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == "latency") {
    for (const int streams : {1, 2}) run(std::stoi(arguments[1]), streams, true);
    return 0;
  }
  if (arguments.empty())
    for (const int streams : {1, 2, 4}) run(2, streams, false);
  for (const std::string& streams : arguments) run(2, std::stoi(streams), false);
}
