// A solution of assignment 5.
#include "tessera/fsdp/plugin.h"

namespace {

using namespace tessera::fsdp;

PluginExports exports() {
  const Axes none, shard = {kShardAxis}, all = {kReplicateAxis, kShardAxis};
  const Sync every_second_step = {.when = Sync::When::period, .what = Sync::What::parameter_delta, .period = 2};
  return {.strategies = {
              {.name = "lean",
               .param_at_rest = none,
               .param_after_forward = none,
               .gradient = none,
               .optimizer = all,
               .two_axes = true},
              {.name = "near",
               .param_at_rest = shard,
               .param_after_forward = none,
               .gradient = shard,
               .optimizer = shard,
               .two_axes = true},
              {.name = "twice",
               .param_at_rest = all,
               .param_after_forward = shard,
               .gradient = all,
               .optimizer = all,
               .two_axes = true},
              {.name = "seldom",
               .param_at_rest = shard,
               .param_after_forward = shard,
               .gradient = shard,
               .optimizer = shard,
               .sync = {{kReplicateAxis, every_second_step}},
               .two_axes = true},
          }};
}

}  // namespace

TESSERA_FSDP_PLUGIN(exports)
