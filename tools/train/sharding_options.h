// The options of sharding: the strategy and its mesh, units and collectives, and what is unsharded when.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <string>
#include <vector>

#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::tools {

/// Those that compare and plan run by default, as far as they can.
inline constexpr std::array kDefaultStrategies = {"ddp", "zero1", "zero2", "fsdp", "hsdp"};

/// As given on the command line; see the help texts in sharding_options.cpp.
struct ShardingOptions {
  std::string strategy = "fsdp";        ///< of one run
  std::vector<std::string> strategies;  ///< of several; empty: kDefaultStrategies
  std::string mesh;
  std::vector<std::string> collectives;
  fsdp::SyncOverrides period;
  std::string wrap = "block";
  int prefetch = 1;
  std::string backward_prefetch = "pre";
  int limit_all_gathers = 0;
  std::string reshard_after_forward;
  std::string reshard_after_backward;
  bool cpu_offload = false;
};

void add_strategy_option(CLI::App& command, ShardingOptions& o);
void add_sharding_options(CLI::App& command, ShardingOptions& o);
void add_offload_option(CLI::App& command, ShardingOptions& o);

/// Throws InvalidUsage if options of a sync period are given but no strategy has one.
void check_period(const ShardingOptions& o);

/// Throws InvalidUsage for a sync period with --precision f16: replicas would skip different steps of a scaled loss.
void refuse_scaled_replicas(const fsdp::Strategy& strategy, const fsdp::Precision& precision);

}  // namespace tessera::tools
