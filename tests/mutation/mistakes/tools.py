"""tools: effects of options, printed and written results, start and end of ranks."""

from table import mistake


def option(case):
    return f"tools.options::{case}"


OPTIMIZER = option("OptionsTest.test_optimizer_options_follow_formula")
SCHEDULE = option("OptionsTest.test_the_learning_rate_follows_its_schedule")
NORM = option("OptionsTest.test_clips_by_configured_norm")
GATHERS = option("OptionsTest.test_gathers_follow_configured_order")
CHANGES = option("OptionsTest.test_every_option_has_effect")
LAUNCHER = (r"^tools\.launcher$", r"^tools\.Launcher\.", r"^tools\.LaunchPrefix\.")
COMPARE = r"^tools\.training$"

MISTAKES = [
    # Options that are parsed but not applied.
    mistake("option-eps", "src/nn/optimizer.cpp", "  args.eps = config.eps;\n", "  args.eps = 1e-8;\n", OPTIMIZER, "--eps does nothing"),
    mistake("option-amsgrad", "tools/train/options.cpp", "c.amsgrad, \"use the largest", "c.maximize, \"use the largest", OPTIMIZER, "--amsgrad has another effect"),
    mistake("option-maximize", "src/nn/optimizer.cpp", "  args.maximize = config.maximize;\n  args.first_step", "  args.first_step",
            OPTIMIZER, "--maximize does nothing with sgd"),
    mistake("option-nesterov", "src/nn/optimizer.cpp", "  args.nesterov = config.nesterov;\n", "  args.nesterov = false;\n", OPTIMIZER, "--nesterov does nothing"),
    mistake("option-betas-swapped", "tools/train/options.cpp", "  optimizer.beta1 = o.betas.at(0);\n  optimizer.beta2 = o.betas.at(1);",
            "  optimizer.beta1 = o.betas.at(1);\n  optimizer.beta2 = o.betas.at(0);", OPTIMIZER, "--betas are swapped"),
    mistake("option-weight-decay", "tools/train/engine_options.cpp", "  engine.optimizer = plan.options.optimizer_config;\n",
            "  engine.optimizer = plan.options.optimizer_config;\n  engine.optimizer.weight_decay = 0.01;\n", OPTIMIZER, "--weight-decay does nothing"),
    mistake("option-warmup", "tools/train/options.cpp", ".warmup = o.warmup,", ".warmup = 0,", SCHEDULE, "--warmup does nothing"),
    mistake("option-schedule", "tools/train/options.cpp", ".kind = nn::parse_schedule(o.schedule),", ".kind = nn::LrSchedule::Kind::constant,", SCHEDULE, "--schedule does nothing"),
    mistake("schedule-a-step-late", "tools/train/trainer.cpp", "nn::learning_rate(plan_.schedule, step + 1)", "nn::learning_rate(plan_.schedule, step)",
            SCHEDULE, "the first step's learning rate is 0"),
    mistake("option-norm-type", "tools/train/options.cpp", "type == \"3\" ? nn::kernels::Norm::three", "type == \"3\" ? nn::kernels::Norm::two", NORM, "--norm-type 3 acts as 2"),
    mistake("option-clip-norm", "tools/train/engine_options.cpp", "  engine.clip_norm = plan.options.clip_norm;\n", "", CHANGES, "--clip-norm does nothing"),
    mistake("option-reduce-when", "tools/train/engine_options.cpp", "  if (!plan.options.reduce_when.empty())\n", "  if (plan.options.reduce_when == \"scatter\")\n",
            CHANGES, "--reduce-when last does nothing"),
    mistake("option-backward-prefetch", "tools/train/engine_options.cpp", "plan.options.backward_prefetch == \"post\" ?", "plan.options.backward_prefetch == \"\" ?",
            GATHERS, "--backward-prefetch post does nothing"),
    mistake("option-limit-all-gathers", "tools/train/engine_options.cpp", "  engine.limit_all_gathers = plan.options.limit_all_gathers;\n", "", GATHERS, "--limit-all-gathers does nothing"),
    mistake("option-prefetch", "tools/train/engine_options.cpp", "  engine.prefetch = plan.options.prefetch;\n", "", GATHERS, "--prefetch does nothing"),
    mistake("option-reshard-after-forward", "tools/train/engine_options.cpp", "    engine.reshard_after_forward = value == \"true\";", "    engine.reshard_after_forward = true;",
            GATHERS, "--reshard-after-forward false does nothing"),
    mistake("option-reshard-after-backward", "tools/train/engine_options.cpp", "  engine.reshard_after_backward = plan.options.reshard_after_backward != \"false\";\n", "",
            GATHERS, "--reshard-after-backward false does nothing"),
    mistake("option-outer-momentum", "src/fsdp/strategy.cpp", "  sync.outer.momentum = period.outer_momentum.value_or(sync.outer.momentum);\n", "", CHANGES, "--outer-momentum does nothing"),
    mistake("option-outer-lr", "src/fsdp/strategy.cpp", "  sync.outer.learning_rate = period.outer_learning_rate.value_or(sync.outer.learning_rate);\n", "",
            (CHANGES, COMPARE), "--outer-lr does nothing"),
    mistake("option-sync-every", "src/fsdp/strategy.cpp", "  sync.period = period.steps.value_or(sync.period);\n", "", (CHANGES, COMPARE), "--sync-every does nothing"),
    mistake("option-lora-alpha", "tools/train/model_files.cpp", ".alpha = o.lora_alpha.value_or(8)", ".alpha = 8", r"^tools\.lora$", "--lora-alpha does nothing"),
    mistake("option-lora-targets", "tools/train/model_files.cpp", ".targets = o.lora_targets};", ".targets = {}};", (CHANGES, r"^tools\.lora$"), "--lora-targets does nothing"),
    mistake("option-checkpoint-activations", "tools/train/model_task.cpp", "  if (plan.options.checkpoint_activations) nn::checkpoint_activations(model);\n", "",
            COMPARE, "--checkpoint-activations does nothing"),
    mistake("launcher-blames-mpirun", "tools/launch/launcher.cpp", "kForLostRank{200}", "kForLostRank{0}", r"^tools\.LaunchPrefix", "a rank that dies just after its starter is not named"),
    mistake("option-recompute", "tools/train/model_task.cpp", "  model.context().set_recomputed(recomputed_of(plan.options));\n", "", r"^tools\.plan_model$", "--recompute does nothing"),
    mistake("option-f32-modules", "tools/train/model_task.cpp", "set_dtypes(model, plan.precision.compute, plan.options.f32_modules);", "set_dtypes(model, plan.precision.compute, {});",
            (CHANGES, r"^tools\.f32_modules$"), "--f32-modules does nothing"),
    mistake("option-reduce-dtype", "tools/train/engine_options.cpp", "  if (plan.precision.casts()) engine.reduce_dtype = plan.precision.reduce;\n", "",
            COMPARE, "--reduce-dtype does nothing"),
    mistake("option-seed-of-data", "tools/train/model_task.cpp", "plan.options.global_batch, plan.options.seed});", "plan.options.global_batch, 0});",
            CHANGES, "--seed does not change the order of batches"),
    mistake("option-seed-of-dropout", "tools/train/model_task.cpp", "NnTask(prepared_model(plan, context), plan.options.seed)", "NnTask(prepared_model(plan, context), 0)",
            CHANGES, "--seed does not change dropout"),
    mistake("option-accumulate", "tools/train/trainer.cpp", "(scaler_ ? scaler_->scale() : 1.0) / static_cast<double>(plan_.options.accumulate);", "scaler_ ? scaler_->scale() : 1.0;",
            COMPARE, "--accumulate N multiplies gradients by N"),
    mistake("option-threads", "tools/train/plan.cpp", "  if (o.threads) return *o.threads;\n", "", COMPARE, "--threads does nothing"),

    # Figures and files.
    mistake("loss-of-one-microbatch", "src/fsdp/nn_task.cpp", "mean += loss.item() / static_cast<double>(losses.size());", "mean = loss.item();",
            option("FiguresTest.test_the_loss_is_the_mean_over_microbatches"), "with --accumulate the printed loss is the last microbatch's"),
    mistake("warm-up-counted", "tools/train/trainer.cpp", "values.begin() + 2, values.end()", "values.begin(), values.end()",
            option("FiguresTest.test_times_exclude_first_two_steps"), "step_ms includes warm-up steps"),
    mistake("p95-is-the-median", "tools/train/trainer.cpp", "percentile(warm, 0.95)", "percentile(warm, 0.5)",
            option("FiguresTest.test_times_exclude_first_two_steps"), "p95 is the median"),
    mistake("eval-counts-windows-twice", "tools/train/measurements.cpp", "sums[1] += static_cast<double>(real);", "sums[1] += static_cast<double>(at_once);",
            COMPARE, "--eval depends on the number of ranks"),
    mistake("eval-with-dropout", "src/fsdp/nn_task.cpp", "  const nn::EvaluationScope no_dropout(context());\n", "",
            option("FiguresTest.test_an_evaluation_has_no_dropout"), "--eval applies dropout"),
    mistake("trace-of-one-rank", "tools/train/step_recorder.cpp", "mine.push_back({static_cast<int>(e.kind), e.unit, e.rank,", "mine.push_back({static_cast<int>(e.kind), e.unit, 0,",
            COMPARE, "--trace shows all ranks as one"),
    mistake("export-misses-the-last-step", "tools/train/trainer.cpp", "    engine_.sync_replicas();  // with a sync period: makes all replicas equal for what follows\n", "",
            option("FiguresTest.test_replicas_sync_before_export"), "local_sgd exports one replica"),
    mistake("adapter-config-alpha", "src/nn/peft_adapter.cpp", "{\"lora_alpha\", options.alpha},", "{\"lora_alpha\", options.rank},", r"^tools\.lora$", "PEFT scales an exported adapter wrongly"),
    mistake("json-of-a-full-disk", "tools/cli/line_file.cpp", "  if (!file_) throw base::SystemError(option_ + \": writing failed; is the disk full?\");\n", "",
            option("FiguresTest.test_results_that_cannot_be_written_are_an_error"), "--json on a full disk exits with code 0"),
    mistake("lost-output-is-success", "tools/main.cpp", "std::fflush(stdout) == 0 && std::ferror(stdout) == 0", "std::fflush(stdout) != 12345",
            option("FiguresTest.test_results_that_cannot_be_written_are_an_error"), "output lost on a full disk exits with code 0"),
    mistake("usage-error-code", "tools/main.cpp", "  if (error.kind() == \"InvalidUsage\") return 2;", "  if (error.kind() == \"InvalidUsage\") return 1;", r"^tools\.option_values$", "wrong usage exits with code 1"),
    mistake("save-failure-is-success", "tools/train/train.cpp", "  if (!outcome.save_failure.empty()) throw base::SystemError(outcome.save_failure);\n", "",
            "tools.checkpoint::CheckpointTest.test_full_disk_fails_save_and_not_training", "a run without its last checkpoint exits with code 0"),
    mistake("divergence-warns-every-step", "tools/train/divergence.cpp", "  warned_ = true;\n", "", r"^tools\.Divergence", "one warning per step"),
    mistake("divergence-names-all", "tools/train/divergence.cpp", "    if (!std::isfinite(losses[rank])) ranks.push_back(std::to_string(rank));", "    ranks.push_back(std::to_string(rank));", r"^tools\.Divergence", "the rank with the NaN is not named"),

    # Ranks.
    mistake("launcher-blames-the-last", "tools/launch/launcher.cpp", "  if (first || better) end_.first_failed = best;", "  end_.first_failed = best;", LAUNCHER, "the rank that failed last is named"),
    mistake("launcher-blames-the-stopped", "tools/launch/launcher.cpp", "    rank.stopped_by_launcher = true;\n", "", LAUNCHER, "a rank that the launcher stopped is named"),
    mistake("launcher-forgets-stopped", "tools/launch/launcher.cpp", "    ::kill(rank.pid, SIGCONT);\n", "", LAUNCHER, "a stopped rank is never ended"),
    mistake("launcher-forgets-grandchildren", "tools/launch/launcher.cpp", "  kill_children(guardian_.pid());  // before the pipes", "  // before the pipes", LAUNCHER, "child processes of ranks keep running"),
    mistake("launcher-never-kills", "tools/launch/launcher.cpp", "stage_ == Stage::terminating && since >= plan_.grace + plan_.kill_after", "stage_ == Stage::terminating && since < plan_.grace", LAUNCHER, "a rank that ignores SIGTERM keeps running"),
    mistake("rank-outlives-launcher", "tools/launch/process.cpp", "  ::prctl(PR_SET_PDEATHSIG, SIGKILL);\n", "", (*LAUNCHER, r"^tools\.failure$"), "ranks outlive a killed launcher for a while"),
    mistake("guardian-sleeps", "tools/launch/process.cpp", "  if (got == 1) ::_exit(0);", "  if (got >= 0) ::_exit(0);", LAUNCHER, "grandchildren outlive a killed launcher"),
    mistake("bound-to-one-core", "tools/launch/launcher.cpp", "  return {cores.begin() + rank * share, cores.begin() + (rank + 1) * share};", "  return {cores.begin(), cores.begin() + share};",
            (*LAUNCHER, COMPARE), "all ranks share the first cores"),
    mistake("second-interrupt-ignored", "tools/launch/launcher.cpp", "    stage_ = Stage::killing;\n    return signal_running(SIGKILL);", "    return;",
            "tools.launcher::LauncherTest.test_a_second_interrupt_ends_ranks_at_once", "a second Ctrl-C has no effect"),

    # Plans.
    mistake("plan-ignores-precision", "tools/plan/plan.cpp", "  spec.precision = precision_of(resolved);\n", "", r"^tools\.plan$", "the ZeRO table is always in f32"),
    mistake("plan-ignores-optimizer", "tools/plan/plan.cpp", "  spec.optimizer = optimizer_of(options);\n", "", r"^tools\.plan$", "the ZeRO table is always for adamw"),
    mistake("plan-mesh-of-one-host", "tools/plan/plan.cpp", "  spec.ranks_per_host = cluster.ranks_per_host;\n", "", r"^tools\.plan$", "hsdp ignores the hosts of --cluster"),
    mistake("plan-rounds-halves-down", "tools/plan/zero_table.cpp", " / 1e9 * (1 + 1e-12);", " / 1e9;", r"^tools\.plan$", "41.25 GB is shown as 41.2"),
    mistake("plan-pads-nothing", "tools/plan/zero_table.cpp", "  return (parameters + shards - 1) / shards * shards;", "  return parameters;", r"^tools\.ZeroTable\.", "shards that are too small for the last elements"),
    mistake("cluster-ignores-unknown-keys", "tools/cli/json_object.cpp", "    if (std::find(known_.begin(), known_.end(), key) == known_.end())\n      fail(", "    if (false)\n      fail(", r"^tools\.ClusterFile\.", "a misspelled key of a cluster file has no effect"),
    mistake("cluster-loses-sharing", "tools/plan/cluster_file.cpp", "  if (json.has(\"sharing\")) cluster.sharing = static_cast<PortSharing>(json.choice(\"sharing\", kSharing));\n", "  json.has(\"sharing\");\n", r"^tools\.ClusterFile\.", "a cluster file's sharing has no effect"),
    mistake("chakra-forgets-joins", "src/plan/step_graph.cpp", "      nodes_of[id - tasks.first] = std::move(after);\n", "", r"^tools\.chakra$", "waits for streams are missing in Chakra traces"),
    mistake("chakra-prunes-too-much", "src/plan/step_graph.cpp", "reached_[later][place.chain] >= place.position;", "reached_[later][place.chain] > 0;", r"^tools\.chakra$",
            "dependencies are missing in Chakra traces"),
    mistake("chakra-starts-before-groups", "bench/plan_chakra.py", " if after else varint(GROUPS_NODE))", ")", r"^tools\.chakra$", "operations start before their groups are known"),
    mistake("chakra-groups-of-rank-0", "bench/plan_chakra.py", "framed(groups_node(mine))", "framed(groups_node(groups.of_rank(0)))", r"^tools\.chakra$", "all ranks list the groups of rank 0"),
    mistake("chakra-groups-overlap", "bench/plan_chakra.py", "rank // block * stride + place, [", "rank // block + place, [", r"^tools\.chakra$", "several groups have one number"),
    mistake("plan-waits-between-steps", "src/plan/simulation.cpp", "    if (!step.continuous) engine.wait();\n", "    engine.wait();\n", r"^plan_simulation\.StepPrediction\.",
            "plans of zero1 wait for the gathers of updated parameters"),
    mistake("plan-ignores-gaps", "tools/plan/simulated_cluster.cpp", "seconds_of(gaps, operation).value_or(*seconds)", "*seconds", r"^tools_bench\.MeasuredCluster\.",
            "calls in flight take turns for their whole time"),
    mistake("graph-counts-the-step-before", "tools/plan/step_plan.cpp", "{first.begin_task, first.first_issued, step.issued_end}", "{first.begin_task, first.begin_task + 1, step.end_task + 1}",
            (r"^tools\.report_what_if$", r"^tools\.chakra$"), "a gather of the step before is in the graph, and the last one is not"),
    mistake("chakra-mixes-steps", "tools/plan/step_plan.cpp", "{first.begin_task, first.first_issued, step", "{first.begin_task, 1, step", r"^tools\.chakra$", "the initialization is in Chakra traces"),
    mistake("trace-overlaps-transfers", "src/base/trace.cpp", "      if (row.free_ns > e.begun_ns) continue;\n", "", r"^base\.ChromeTrace\.", "transfers hide each other in a trace"),
    mistake("trace-names-another-axis", "tools/plan/step_plan.cpp", " && stride == members.stride)", " && stride >= 1)", r"^tools\.chakra$", "transfers are in the row of another axis"),
    mistake("link-in-bytes", "tools/cli/quantities.cpp", "{\"Gbit/s\", 1e9 / 8}", "{\"Gbit/s\", 1e9}", r"^tools\.Quantities\.", "bits of a link are read as bytes"),
    mistake("validate-ignores-interference", "bench/published_step.py", "slow = 1 - LAUNCH_BLOCKS / self.workload.device.multiprocessors\n",
            "slow = 1\n", r"^tools\.validation$", "collectives take no multiprocessors away from kernels"),
    mistake("validate-records-only", "bench/published_step.py", "if more > 0 and len", "if more > 9 and len", r"^tools\.validation$", "some microbatches of a step are lost"),
    mistake("validate-counts-calibration", "bench/plan_published.py", "if not row[\"calibration\"] and \"outlier\" not in row and source", "if \"outlier\" not in row and source", r"^tools\.validation$", "rows that calibrate count as predicted"),

    # report
    mistake("page-runs-any-script", "tools/pages/page.cpp", "hashes += \" \" + hash_source(std::string(script));", "hashes = \" 'unsafe-inline'\";", r"^tools\.report_page$", "a string that becomes a script runs"),

    # explain
    mistake("explain-shard-of-another-rank", "tools/explain/wrapping.cpp", "range = {range.begin + part * (rank % axis->size), range.begin + part * (rank % axis->size + 1)};", "range = {range.begin + part * (axis->size - 1 - rank % axis->size), range.begin + part * (axis->size - rank % axis->size)};",
            r"^tools\.explain$", "explain shows a rank the shard of another one"),
    mistake("page-hides-the-queue", "tools/pages/live/view.js", "...(t.begun > t.called ? [", "...(t.begun < t.called ? [", r"^tools\.explain_page$", "transfers that wait for their link are not drawn"),
    mistake("page-memory-in-host-time", "src/plan/simulation.cpp", "        change.at_ns = clock_->times_of(static_cast<TaskId>(change.at_ns)).end_ns;", "        change.at_ns += 0;",
            r"^tools\.explain_page$", "memory of a simulated step has no times"),
    mistake("explain-ignores-the-terminal", "tools/explain/explain.cpp", "    room = size.ws_col;", "    room = kWide;", r"^tools\.explain$", "text is wider than the terminal"),
    mistake("explain-never-frees", "tools/explain/story.cpp", "    unsharded_.erase(event.unit);\n", "", r"^tools\.explain$", "explain counts units as gathered that were freed"),
    mistake("explain-counts-earlier-steps", "tools/plan/step_plan.cpp", "if (transfer.task >= step.first_issued)", "if (transfer.task > 0)", r"^tools\.explain$", "explain counts the bytes of two steps"),
    mistake("explain-hooks-too-late", "tools/explain/real_step.cpp", "          measure_gradient(i, engine.loss_scale());\n          if (engine_hook) engine_hook();\n", "          if (engine_hook) engine_hook();\n          measure_gradient(i, engine.loss_scale());\n",
            r"^tools\.explain$", "explain shows gradients after their reduction as those before it"),
    # Differences of times, and why.
    mistake("rounds-one-sided", "tools/results/rounds.cpp", "  return 1 - 2 * outside;", "  return 1 - outside;", r"^tools\.(MedianIntervals|Rounds)\.", "intervals are too narrow for the coverage that they promise"),
    mistake("rounds-not-paired", "tools/results/rounds.cpp", "values.push_back(of_b[i] - of_a[i]);", "values.push_back(of_b[i] - of_a.front());", r"^tools\.Rounds\.", "the machine's slow minutes count as a strategy's"),
    mistake("rounds-unequal-unsaid", "tools/results/rounds.cpp", "    if (!ends_alike(round, rounds.front())) all.", "    if (!ends_alike(round, round)) all.", r"^tools\.RepeatedRuns\.", "runs that can't be repeated are compared in silence"),
    mistake("why-term-dropped", "tools/results/why.cpp", "[](const StepParts& p) { return -p.hidden(); }", "[](const StepParts& p) { return 0 * p.step(); }", (r"^tools\.Why\.", r"^tools\.why$"), "the terms don't add up to the gap"),
    mistake("why-late-is-transport", "tools/results/step_parts.cpp", "std::clamp(wait.all_called_ns, wait.begin_ns, wait.end_ns);", "wait.begin_ns;", (r"^tools\.StepParts\.", r"^tools\.Why\."), "a rank that sleeps counts as a slow link"),
    mistake("why-outer-counts-too", "tools/results/step_parts.cpp", "    pass(begin);\n", "", r"^tools\.StepParts\.", "a wait inside a forward counts as the forward"),
    mistake("why-decoding-is-link", "tools/plan/planned_why.cpp", "  return wait_between(wait.start_ns, through);", "  return wait_between(wait.start_ns, wait.end_ns);", r"^tools\.why$", "decoding after a gather counts as waiting for it"),
    mistake("why-link-of-one-run", "tools/plan/planned_why.cpp", "ms - plan_step(from, machine).result.step_ms_median", "ms - 0 * plan_step(from, machine).result.step_ms_median", r"^tools\.why$", "the gap with another link is not that between two runs over it"),
    # What a run shows, writes and leaves behind.
    mistake("progress-in-a-pipe", "tools/cli/progress_line.cpp", "on_(::isatty(STDERR_FILENO) != 0)", "on_(::isatty(STDERR_FILENO) != 2)", r"^tools\.progress$", "a pipe gets the progress line"),
    mistake("csv-log-keeps-lost-steps", "tools/train/train.cpp", "    if (last > first_step) break;\n", "    if (last > first_step + 9) break;\n", r"^tools\.csv_log$", "a resumed run has steps twice in its table"),
    mistake("postmortem-blames-who-waits", "tools/postmortem/divergence_finder.cpp", "    if (!causes.empty()) divergence.ranks = causes;\n", "", r"^tools\.PostmortemTest\.", "a rank that waits in turn is named as a cause"),
    mistake("postmortem-blames-failed", "tools/postmortem/divergence_finder.cpp", "        if (call->state == comm::flight::State::failed ||\n", "        if (false ||\n", r"^tools\.PostmortemTest\.", "a rank whose call failed because another left is named as a cause"),
    mistake("graphs-despite-obstacle", "tools/train/plan.cpp", "  if (obstacle.empty()) return", "  if (obstacle.empty() || !wanted) return", r"^tools\.GraphUse\.", "steps that a graph can't contain are captured by default"),
]
