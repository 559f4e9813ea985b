// A small plug-in that the build compiles in several variants: each has one defect or none.
#include <stdexcept>

#include "tessera/fsdp/plugin.h"

namespace {

using namespace tessera::fsdp;
using tessera::comm::OpKind;

/// A type that exists in this module only.
struct OwnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Runs the communicator's own operation and nothing else.
class PlainCollective final : public CollectivePlugin {
 public:
  explicit PlainCollective(OpKind kind) : kind_(kind) {}
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& transfer : call.transfers) works.add(start_plain(kind_, call, transfer));
    return works;
  }

 private:
  const OpKind kind_;
};

ExportedCollective plain_collective(OpKind kind, std::string name) {
  return {kind, std::move(name), [kind] { return std::make_unique<PlainCollective>(kind); }};
}

[[maybe_unused]] PluginExports exports() {
  const Axes shard = {kShardAxis};
  Strategy own{.name = "own",
               .param_at_rest = shard,
               .param_after_forward = shard,
               .gradient = shard,
               .optimizer = shard,
               .all_gather = "carrier",  // the plug-in's own collective
               .reduce_scatter = "bf16"};
  PluginExports all{.collectives = {plain_collective(OpKind::all_gather, "carrier"),
                                    plain_collective(OpKind::all_reduce, "carrier"),
                                    {OpKind::all_gather, "throwing",
                                     []() -> std::unique_ptr<CollectivePlugin> { throw OwnError("the pen is dry"); }},
                                    {OpKind::all_gather, "nothing", [] { return std::unique_ptr<CollectivePlugin>(); }},
                                    {OpKind::all_gather, "priceless",
                                     [] { return std::make_unique<PlainCollective>(OpKind::all_gather); },
                                     [](const CollectiveSize&) -> CollectiveCost { throw OwnError("beyond price"); }}},
                    .strategies = {own},
                    .tasks = {{"throwing",
                               [](const TaskSetup& setup) -> std::unique_ptr<TrainingTask> {
                                 throw OwnError("no answer in " + setup.options.text("book", "no book"));
                               }},
                              {"nothing", [](const TaskSetup&) { return std::unique_ptr<TrainingTask>(); }}}};
#if defined(THROWS)
  throw OwnError("no ink");
#elif defined(TWICE)
  all.strategies.push_back(own);
#elif defined(MISNAMED)
  all.collectives.push_back(plain_collective(OpKind::all_gather, "a+b"));
#elif defined(LOST)
  all.strategies[0].all_gather = "nowhere";
#elif defined(MAKERLESS)
  all.collectives[0].make = {};
#elif defined(MODELTWICE)
  all.tasks.push_back(all.tasks.front());
#elif defined(MODELMAKERLESS)
  all.tasks[0].make = {};
#elif defined(SENT)
  all.collectives[0].collective = OpKind::send;
#elif defined(NONSENSE)
  all.strategies[0].optimizer = {};
#elif defined(STRANGER)
  for (Axes Strategy::*axes : {&Strategy::param_at_rest, &Strategy::gradient, &Strategy::optimizer})
    (all.strategies[0].*axes).insert("tensor");
#endif
  return all;
}

}  // namespace

#if defined(OTHERABI)
extern "C" TESSERA_API const tessera_fsdp_plugin* tessera_fsdp_plugin_entry() {
  static const tessera_fsdp_plugin plugin = plugin_of<exports>("fsdp 0, quills");
  return &plugin;
}
#elif defined(OTHERSIZE)
extern "C" TESSERA_API const tessera_fsdp_plugin* tessera_fsdp_plugin_entry() {
  static tessera_fsdp_plugin plugin = plugin_of<exports>(TESSERA_FSDP_PLUGIN_ABI);
  plugin.size += 8;
  return &plugin;
}
#elif !defined(NOENTRY)
TESSERA_FSDP_PLUGIN(exports)
#endif
