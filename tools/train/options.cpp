#include "tools/train/options.h"

#include <limits>

#include "tools/cli/machine.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

namespace {

void add_loop_options(CLI::App& command, TrainOptions& o) {
  add_option(command, "--steps", o.steps, "optimizer steps in total, also when resuming", whole_number(0, 1ULL << 40));
  add_schedule_options(command, o);
  add_option(command, "--seed", o.seed, "seed of initial values, batch order and dropout",
             whole_number(0, std::numeric_limits<std::uint64_t>::max()));
}

}  // namespace

void add_step_options(CLI::App& command, StepOptions& o) {
  add_model_options(command, o);
  add_batch_options(command, o);
  add_precision_options(command, o);
  add_accumulation_options(command, o);
  add_norm_options(command, o);
  add_optimizer_options(command, o);
  add_sharding_options(command, o);
  add_recompute_options(command, o);
  add_offload_option(command, o);
}

void add_world_options(CLI::App& command, WorldOptions& world, BatchOptions& batch) {
  add_option(command, "--ranks", world.ranks, "number of ranks; under a launcher, its number (default: 4)",
             whole_number(1, 4096));
  add_option(command, "--backend", world.backend, "backend that connects the ranks; overrides TESSERA_BACKEND")
      ->each([&world](const std::string&) { world.backend_given = true; });
  add_data_options(command, batch);
  add_option(command, "--threads", world.threads,
             "compute threads per rank; ranks are bound to cores if each thread has one (default: cores / ranks)",
             whole_number(1, 1024));
}

void add_train_options(CLI::App& command, TrainOptions& o) {
  add_step_options(command, o);
  add_world_options(command, o, o);
  add_device_option(command, o.device);
  // As a variable, an optional<bool> would be false without the flag.
  command.add_flag_function(
      "--graphs,!--no-graphs", [&o](std::int64_t given) { o.graphs = given > 0; },
      "replay forward and backward as one captured device graph (default: where a step allows it: one "
      "rank on CUDA, without what changes from step to step)");
  add_init_options(command, o);
  add_loop_options(command, o);
  add_link_options(command, o);
  add_optimizer_settings(command, o);
  add_option(command, "--eval", o.eval, "print the mean loss over this file after training", "FILE");
  add_option(command, "--json", o.json, "write the results as JSON", "FILE");
  add_option(command, "--peak-flops", o.peak_flops,
             "peak of a rank's device, such as 312TFLOP/s, for the MFU (default: known for H100, H200 and A100)",
             "FLOPS");
  add_option(command, "--flight-recorder", o.flight_recorder,
             "record the last calls of each rank in this directory, for report --postmortem after a failure", "DIR");
  add_option(command, "--trace", o.trace, "write the last step of every rank as a Chrome trace, which Perfetto opens",
             "FILE");
}

}  // namespace tessera::tools
