// Helpers that the comm tests share.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <vector>

#include "tessera/comm/init.h"

namespace tessera::comm_test {

using namespace tessera::base;
using namespace tessera::comm;
using namespace std::chrono_literals;

inline InitOptions quick_config() {
  InitOptions config;
  config.backend = "shm";
  config.timeout = 60s;
  config.algorithms = "";
  return config;
}

inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  run_threads(ranks, quick_config(), body);
}

/// Sums of small whole numbers are exact: rank r contributes r + 1.
inline float sum_of_ranks(int ranks) { return static_cast<float>(ranks * (ranks + 1) / 2); }

/// The error that `call` throws, as "Kind: text"; "" if none.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
  return "";
}

}  // namespace tessera::comm_test
