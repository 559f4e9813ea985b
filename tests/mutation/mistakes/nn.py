"""src/nn and plugins: layers, data, files; compression and decorators."""

from table import mistake

ENCODED = (r"^collectives\.", r"^fsdp_compression\.", r"^fsdp_plugin_state\.")
DECORATORS = r"^decorators\."

MISTAKES = [
    mistake("data-last-window-left-out", "src/nn/data.cpp", "options_.range.count() - options_.positions);\n}", "options_.range.count() - options_.positions - 1);\n}",
            r"^nn\.Batches", "the last tokens of a file are never used"),
    mistake("data-beyond-its-range", "src/nn/data.cpp", "options_.range.count() - options_.positions);\n}", "options_.range.count() - options_.positions + 1);\n}",
            r"^nn\.Batches", "training reads a token of the validation part"),
    mistake("data-order-of-seed-only", "src/nn/data.cpp", "  const auto sample = static_cast<std::uint64_t>(step - 1) *", "  const auto sample = static_cast<std::uint64_t>(step * 0) *",
            r"^nn\.Batches", "every step has the same batch"),
    mistake("data-file-border", "src/nn/data.cpp", "    const std::int64_t part = std::min(count, ends_[file] - begin);", "    const std::int64_t part = std::min(count, ends_[file] - start);",
            r"^nn\.TokenFiles", "a window across two files reads beyond the first"),
    mistake("data-vocabulary-border", "src/nn/data.cpp", "  if (most >= vocabulary)", "  if (most > vocabulary)", r"^nn\.TokenFiles", "a token equal to the vocabulary reads beyond the embedding"),
    mistake("windows-beyond-count", "src/nn/data.cpp", "  return {ids(0, 0), ids(1, kernels::kIgnoreIndex)};", "  return {ids(0, 0), ids(1, 0)};", (r"^nn\.SequentialWindows", r"^tools\.training$"), "--eval counts tokens beyond the file"),
    mistake("warmup-a-step-short", "src/nn/lr_schedule.cpp", "  if (step <= schedule.warmup) return schedule.peak * static_cast<double>(step) / static_cast<double>(schedule.warmup);",
            "  if (step < schedule.warmup) return schedule.peak * static_cast<double>(step + 1) / static_cast<double>(schedule.warmup);", r"^nn\.LrSchedules", "the warm-up is one step too short"),
    mistake("cosine-counts-warmup", "src/nn/lr_schedule.cpp", "static_cast<double>(step - schedule.warmup) / length", "static_cast<double>(step) / length", r"^nn\.LrSchedules", "the cosine schedule starts midway"),
    mistake("biases-decay", "src/nn/optimizer.cpp", "  args.weight_decay = range.decay ? config.weight_decay : 0.0;\n  args.decoupled", "  args.weight_decay = config.weight_decay;\n  args.decoupled",
            (r"^nn\.", r"^peers\.", r"^fsdp_requires_grad\."), "norms and biases get weight decay"),
    mistake("unused-parameters-move", "src/nn/optimizer.cpp", "    if (!gradient.written()) continue;", "    if (!gradient.written()) gradient.write();", (r"^nn\.", r"^nn_ops\."), "unused parameters are updated"),
    mistake("gradients-kept", "src/nn/optimizer.cpp", "    gradient.clear();\n", "", (r"^nn\.", r"^nn_ops\.", r"^peers\."), "gradients accumulate over steps"),
    mistake("momentum-of-the-first-step", "src/nn/optimizer.cpp", "  args.first_step = step.number == 1;", "  args.first_step = false;", (r"^nn\.", r"^peers\."), "sgd's momentum starts damped"),
    mistake("shared-gradient-overwritten", "src/nn/gradient.cpp", "  if (written_ && !bound_ && value_.shares_memory()) {", "  if (written_ && bound_ && value_.shares_memory()) {", r"^nn_ops\.", "two branches share a gradient that one of them changes"),
    mistake("lora-factor", "src/nn/lora.cpp", "    layer->add_adapter(options.rank, options.factor());", "    layer->add_adapter(options.rank, options.alpha);", (r"^nn\.Lora", r"^tools\.lora$"), "adapters are scaled by alpha, not alpha / rank"),
    mistake("lora-matches-inside-names", "src/nn/lora.cpp", " && path.ends_with(target) && path[path.size() - target.size() - 1] == '.');", " && path.ends_with(target));", r"^nn\.Lora", "--lora-targets proj also matches c_proj"),
    mistake("base-is-trained", "src/nn/lora.cpp", "    tensor.set_requires_grad(false);\n", "", (r"^nn\.Lora", r"^tools\.lora$"), "--lora trains the whole model"),
    mistake("recompute-draws-new-masks", "src/nn/activation_checkpoint.cpp", "  const ForwardStateScope state(region.context, region.state);\n", "", r"^nn\.ActivationCheckpoint", "a recomputed block uses other dropout masks"),
    mistake("tape-runs-twice", "src/nn/tape.cpp", "  node.backward();\n  node.output->clear();", "  node.backward();", (r"^nn\.", r"^nn_ops\.", r"^fsdp_acceptance_cost\..*P05"), "intermediate gradients stay in memory"),
    mistake("dropout-of-every-module", "src/nn/random.cpp", "  const std::uint64_t name = hash_name(module) ^ kDropoutDomain;", "  const std::uint64_t name = hash_name(module.substr(module.size())) ^ kDropoutDomain;", (r"^nn_random\.", r"^nn_ops\.", r"^nn\."), "all modules use the same dropout mask"),
    mistake("safetensors-beyond-the-end", "src/nn/safetensors.cpp", "range.begin > range.end || range.end > entry.count())", "range.begin > range.end || range.end > entry.count() + 1)", r"^nn\.Safetensors", "a range may read a neighbour's element"),
    mistake("safetensors-half-written", "src/nn/io/safetensors_writer.cpp", "    if (place.written != place.count)\n", "    if (place.written > place.count)\n", r"^nn\.Safetensors", "an export without all elements counts as complete"),
    mistake("tied-head-read-twice", "src/nn/hf_checkpoint.cpp", "(config_.tied && name == \"lm_head.weight\")", "(config_.tied && name == \"lm_head.bias\")", r"^nn\.HfCheckpoints", "folders of transformers with tied weights don't open"),
    mistake("config-before-weights", "src/nn/hf_checkpoint.cpp", "  commit_described(directory_ + \"/config.json\", config_json(config_), [&] { writer_.commit(); });", "  writer_.commit();", (r"^nn\.HfCheckpoints", r"^tools\.training$"), "an exported folder has no config.json"),
    mistake("previous-config-stays", "src/nn/atomic_file.cpp", "  if (differs) {\n    rename_file(path, previous);", "  if (differs) {\n    std::filesystem::copy_file(path, previous);", r"^tools\.durability$", "a killed export leaves the previous model's config.json with the new model"),
    mistake("pool-error-kept", "src/nn/thread_pool.cpp", "    failed_.store(false, std::memory_order_relaxed);\n    busy_", "    busy_", r"^nn_thread_pool\.", "after an exception no kernel runs"),
    mistake("encoding-not-trained-check", "src/nn/module.cpp", "  parameter.tensor_.set_requires_grad(false);\n  parameter.init_", "  parameter.init_", (r"^nn\.", r"^fsdp_lora\."), "NF4 weights are trained as bytes"),

    # plugins
    mistake("feedback-of-slices-lost", "plugins/collectives/compressed.cpp", "                                     .error = flight.slice_error});", "                                     .error = nullptr});", ENCODED, "int8_feedback loses the rounding error of its sums"),
    mistake("feedback-not-saved", "plugins/collectives/compressed.cpp", "    add(errors.name + \"/slice_error\", errors.slice);\n", "", ENCODED, "a resumed run starts without error feedback"),
    mistake("encoded-factor-lost", "plugins/collectives/compressed.cpp", "  return op.kind == ReduceOp::Kind::premul_sum ? static_cast<float>(op.scalar) : 1.0F;", "  return op.kind == ReduceOp::Kind::prod ? static_cast<float>(op.scalar) : 1.0F;", (*ENCODED, r"^fsdp_mixed_strategies\."), "f16 gradients under int8 are n times too large"),
    mistake("encoded-divides-by-ranks", "plugins/collectives/compressed.cpp", "  return op.scalar == 0 ? static_cast<float>(ranks) : static_cast<float>(op.scalar);", "  return static_cast<float>(ranks);", ENCODED, "hsdp+int8 divides by one axis only"),
    mistake("encoded-lease-released-early", "plugins/collectives/compressed.cpp", "  flight.theirs.release(stream.record());\n", "  flight.theirs.release({});\n", ENCODED, "received data is overwritten before it is added"),
    mistake("encoded-saves-nothing-in-stats", "plugins/collectives/compressed.cpp", "    stats_.raw += raw;\n", "", ENCODED, "the report shows no saving"),
    mistake("powersgd-share", "plugins/collectives/powersgd.cpp", "  if (op.kind == ReduceOp::Kind::avg) return op.scalar == 0 ? 1.0 : op.scalar / ranks;", "  if (op.kind == ReduceOp::Kind::avg) return 1.0;", r"^collectives\.PowerSgd", "ddp+powersgd over a part of the mesh keeps a wrong error"),
    mistake("powersgd-padding", "plugins/collectives/powersgd.cpp", "                             (packing.first - packing.first_used) * sizeof(float));", "                             0 * (packing.first - packing.first_used) * sizeof(float));", (*ENCODED, r"^collectives\.PowerSgd"), "the padding of a message is stale memory"),
    mistake("powersgd-not-after-its-caller", "plugins/collectives/powersgd.cpp", "  stream.wait(call.options.after->record());\n", "", ENCODED, "gradients are compressed before they are summed"),
    mistake("powersgd-sent-before-made", "plugins/collectives/powersgd.cpp", "    call.options.after->wait(stream.record());\n", "", ENCODED, "factors are sent before they are computed"),
    mistake("powersgd-q-not-saved", "plugins/collectives/powersgd.cpp", "    all.push_back({plugin_state.name + \"/q\", static_cast<float*>(plugin_state.q.data()), plugin_state.packing.second});\n", "", ENCODED, "a resumed run starts with other factors"),
    mistake("fault-on-every-rank", "plugins/decorators/fault.cpp", "(!options_.rank || *options_.rank == family()->rank)", "(!options_.rank || *options_.rank >= 0)", DECORATORS, "a fault planted on one rank occurs on all"),
    mistake("corrupts-before-its-stream", "plugins/decorators/fault.cpp", "  if (Stream* before = after(); before != nullptr && !before->immediate()) before->record().wait();\n", "", DECORATORS, "the corrupted data is not the data that is sent"),
    mistake("trace-forgets-errors", "plugins/decorators/trace.cpp", "    event.end_ns = host_time_ns();\n    event.error = std::string(error.kind()) + \": \" + error.what();\n    (*sink_)(event);\n    throw;", "    throw;", DECORATORS, "a trace lacks rejected calls"),
    mistake("delay-beyond-deadline", "plugins/decorators/delay.cpp", "called + std::min(delay, limit)));", "called + delay));", DECORATORS, "a delay exceeds the timeout of its operation"),
    mistake("decorator-keeps-stream", "plugins/decorators/decorator.cpp", "    ~Reset() { stream = nullptr; }", "    ~Reset() { static_cast<void>(stream); }", (DECORATORS, r"^fsdp_devices\."), "an operation waits for the stream of an earlier one"),
]
