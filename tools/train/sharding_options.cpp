#include "tools/train/sharding_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

#include "tessera/base/error.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/plugin.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

using base::InvalidUsage;

void add_strategy_option(CLI::App& command, ShardingOptions& o) {
  add_option(command, "--strategy", o.strategy,
             fmt::format("sharding strategy: {}, PyTorch's name for one, or FILE.so:NAME of a plug-in",
                         fmt::join(fsdp::strategy_names(), " ")));
}

void add_sharding_options(CLI::App& command, ShardingOptions& o) {
  add_option(command, "--mesh", o.mesh,
             "replicas x shards for hsdp (default: 2 x ranks/2 on one host, else hosts x ranks per host)", "RxS");
  add_option(command, "--collectives", o.collectives,
             "collective plug-ins of every strategy: PLUGIN (see tessera info), COLLECTIVE=PLUGIN or FILE.so:NAME",
             list_of("[COLLECTIVE=]PLUGIN"));
  add_option(command, "--sync-every", o.period.steps, "sync period of diloco and local_sgd in steps (default: 10)",
             whole_number(1, 1 << 30));
  add_option(command, "--outer-lr", o.period.outer_learning_rate,
             "learning rate of the outer optimizer (default: diloco 0.7, local_sgd 1)", finite_number(0));
  add_option(command, "--outer-momentum", o.period.outer_momentum,
             "Nesterov momentum of the outer optimizer (default: diloco 0.9, local_sgd 0)", finite_number(0));
  add_option(command, "--wrap", o.wrap,
             "modules that form units (see tessera info --units): none, block, size:N, type:CLASS, or a list such "
             "as \"block;wte;ln_f\"");
  add_option(command, "--prefetch", o.prefetch, "units to unshard ahead of the one that computes",
             whole_number(0, 1024));
  add_option(command, "--backward-prefetch", o.backward_prefetch,
             "when backward unshards the next unit: before computing the current one (pre) or after (post)",
             one_of({"pre", "post"}));
  add_option(command, "--limit-all-gathers", o.limit_all_gathers,
             "most units unsharded at once, including the computing one, without the root (0: no limit)",
             whole_number(0, 1024));
  add_option(command, "--reshard-after-forward", o.reshard_after_forward,
             "units to reshard after forward: true: all but the root; false: none; K: to shards over K neighbor "
             "ranks (default: all but the root and the last unit)",
             "true|false|K")
      ->check([](const std::string& value) {
        int ranks = 0;
        const auto end = value.data() + value.size();
        const auto [stop, error] = std::from_chars(value.data(), end, ranks);
        const bool number = error == std::errc() && stop == end && ranks >= 1;
        return value == "true" || value == "false" || number ? "" : "true, false or a number of ranks, not " + value;
      });
  add_option(command, "--reshard-after-backward", o.reshard_after_backward,
             "false: keep parameters unsharded between the microbatches of --accumulate", one_of({"true", "false"}));
}

void add_offload_option(CLI::App& command, ShardingOptions& o) {
  command.add_flag("--cpu-offload", o.cpu_offload,
                   "keep sharded state in pinned host memory; copy it to the device on demand");
}

void check_period(const ShardingOptions& o) {
  if (!o.period.steps && !o.period.outer_learning_rate && !o.period.outer_momentum) return;
  std::vector<std::string> names = o.strategies;
  if (names.empty()) names.push_back(o.strategy);
  const fsdp::CollectiveRegistry registry = fsdp::CollectiveRegistry::built_in();
  for (const std::string& name : names)
    if (!fsdp::periodic_axis(fsdp::parse_strategy(name, registry)).empty()) return;
  throw InvalidUsage(
      "--sync-every, --outer-lr and --outer-momentum need a strategy with a sync period: diloco or local_sgd");
}

void refuse_scaled_replicas(const fsdp::Strategy& strategy, const fsdp::Precision& precision) {
  if (precision.compute == base::DType::f16 && !fsdp::periodic_axis(strategy).empty())
    throw InvalidUsage("--precision f16: under strategy " + strategy.name +
                       " replicas would skip different steps of a scaled loss; use bf16 or f32");
}

}  // namespace tessera::tools
