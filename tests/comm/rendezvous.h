// Rendezvous at TESSERA_MASTER between threads that have their own connections, as processes do.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/bootstrap/rendezvous.h"
#include "tests/comm/network.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {

using std::chrono::steady_clock;

inline RendezvousOptions options_of(int rank, int size, int port, const std::string& host = "127.0.0.1") {
  return {.launch = {.launcher = "tessera", .rank = rank, .size = size, .local_size = size, .job = "run-1"},
          .timeout = 20s,
          .master = host + ":" + std::to_string(port),
          .token = "swordfish"};
}

struct Outcome {
  std::shared_ptr<Bootstrap> bootstrap;
  std::string error;
};

inline std::future<Outcome> come(RendezvousOptions one) {
  return std::async(std::launch::async, [one = std::move(one)] {
    Outcome outcome;
    outcome.error = error_of([&] { outcome.bootstrap = rendezvous(one); });
    return outcome;
  });
}

/// Runs the rendezvous of a whole world; changed(options) may change the options of each rank.
inline std::vector<Outcome> rendezvous_all(int size, int port,
                                           const std::function<void(RendezvousOptions&)>& changed = {},
                                           const std::string& host = "127.0.0.1") {
  std::vector<std::future<Outcome>> coming;
  for (int r = size; r-- > 0;) {
    RendezvousOptions one = options_of(r, size, port, host);
    if (changed) changed(one);
    coming.push_back(come(one));
  }
  std::vector<Outcome> all;
  for (int r = size; r-- > 0;) all.push_back(coming[static_cast<std::size_t>(r)].get());
  return all;
}

inline void assert_complete(const std::vector<Outcome>& all) {
  for (const Outcome& one : all) ASSERT_EQ(one.error, "");
}

}  // namespace tessera::comm_test
