// Processes that run control_program.cpp.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/comm/network.h"
#include "tests/comm/process.h"

namespace tessera::comm_test {

struct ControlRanks {
  int size = 2;
  std::string mode;     ///< the program's argument
  bool master = false;  ///< over TESSERA_MASTER, on several hosts; else over a Unix socket
  std::string timeout = "20s";
};

/// Starts the ranks and waits until all are ready.
inline std::vector<Process> start_ranks(const ControlRanks& world) {
  static int runs = 0;
  const std::string run = "control-" + std::to_string(::getpid()) + "-" + std::to_string(runs++);
  const std::string master = "TESSERA_MASTER=127.0.0.1:" + std::to_string(free_port());
  std::vector<Process> ranks;
  for (int r = 0; r < world.size; ++r) {
    std::vector<std::string> settings = {"TESSERA_RANK=" + std::to_string(r),
                                         "TESSERA_WORLD_SIZE=" + std::to_string(world.size), "TESSERA_RUN_ID=" + run,
                                         "TESSERA_TIMEOUT=" + world.timeout,
                                         "ASAN_OPTIONS=quarantine_size_mb=4"};  // one test measures memory
    if (world.master) {
      settings.push_back(master);
      settings.emplace_back("TESSERA_TOKEN=swordfish");
      settings.push_back("TESSERA_HOST_ID=host" + std::to_string(r));
    }
    ranks.emplace_back(TESSERA_CONTROL_PROGRAM, settings, world.mode);
  }
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "ready");
  return ranks;
}

}  // namespace tessera::comm_test
