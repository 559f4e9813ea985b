#include "tests/fuzz/file_subjects.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/json/json_reader.h"
#include "tessera/base/text.h"
#include "tessera/comm/flight_recorder/format.h"
#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/hf_checkpoint.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/nf4.h"
#include "tessera/nn/peft_adapter.h"
#include "tests/nn/temporary_directory.h"
#include "tools/pages/page.h"
#include "tools/plan/cluster_file.h"
#include "tools/report/flight_log.h"
#include "tools/results/comparison.h"
#include "tools/train/model_files.h"
#include "tools/train/run_checkpointer.h"

namespace tessera::fuzz {
namespace {

using nlohmann::ordered_json;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Whole files.

nn::ModelConfig small_model() {
  nn::ModelConfig config = nn::preset("gpt-nano");
  config.layers = 1;
  config.width = 8;
  config.head_dim = 4;
  config.hidden = 16;
  config.vocabulary = 16;
  config.context = 8;
  return config;
}

const nn::LoraOptions kLora{.rank = 2, .alpha = 4, .targets = {"c_attn"}};

Files files_in(const std::string& folder) {
  Files files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files[entry.path().filename().string()] = text_of(entry.path().string());
  return files;
}

template <class Writer>
void write_zeros(Writer& writer, const std::vector<nn::SafetensorsTensor>& tensors) {
  for (const nn::SafetensorsTensor& tensor : tensors) {
    const std::vector<float> zeros(static_cast<std::size_t>(nn::count_of(tensor.shape)));
    writer.write(tensor.name, {0, static_cast<std::int64_t>(zeros.size())}, zeros.data());
  }
  writer.commit();
}

std::vector<nn::SafetensorsTensor> adapter_tensors(const nn::ModelConfig& config, const nn::LoraOptions& options) {
  nn::Context context;
  const auto model = nn::make_model(context, config);
  nn::add_lora(*model, options);
  std::vector<nn::SafetensorsTensor> tensors = nn::saved_tensors(*model);
  std::erase_if(tensors, [](const auto& tensor) { return !nn::is_adapter(tensor.name); });
  return tensors;
}

Files model_files() {
  const nn::test::TemporaryDirectory folder;
  const auto tensors = tools::dense_tensors(small_model());
  nn::HfCheckpointWriter writer(folder.path(), small_model(), tensors);
  write_zeros(writer, tensors);
  return files_in(folder.path());
}

Files adapter_files() {
  const nn::test::TemporaryDirectory folder;
  const auto tensors = adapter_tensors(small_model(), kLora);
  nn::PeftAdapterWriter writer(folder.path(), nn::lora_json(kLora, small_model(), "base"), small_model(), tensors);
  write_zeros(writer, tensors);
  return files_in(folder.path());
}

constexpr const char *kManifest = "rank-00000.json", *kIndex = "index.json";

std::string hash128(const std::string& text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return digits.data();
}

void fit_hashes(Files& files) {
  try {
    auto index = base::parse_json<ordered_json>(files[kIndex], "index");
    if (index.is_object() && index.contains("manifests") && index["manifests"].is_array())
      index["manifests"][0] = hash128(files[kManifest]);
    if (!index.is_object()) return;
    index.erase("xxh3");
    index["xxh3"] = hash128(index.dump());
    files[kIndex] = index.dump();
  } catch (const base::InvalidUsage&) {  // no JSON any more
  }
}

/// A checkpoint with adapters, of which the other weights are quantized.
Files checkpoint_files() {
  nn::Context context;
  const auto model = nn::make_model(context, small_model());
  nn::quantize_nf4(*model);
  nn::add_lora(*model, kLora);
  ordered_json tensors = ordered_json::array(), pieces = ordered_json::array();
  std::string data;
  for (const auto& parameter : model->parameters()) {
    const bool encoded = parameter->dtype() == base::DType::u8;
    const int states = nn::is_adapter(parameter->name()) ? 1 : 0;
    tensors.push_back({{"name", parameter->name()}, {"shape", parameter->shape()}, {"states", states}});
    for (int what = -1; what < states; ++what) {
      pieces.push_back({parameter->name(), what, 0, parameter->count(), encoded ? "u8" : "f32", data.size()});
      data.append(static_cast<std::size_t>(parameter->count()) * (encoded ? 1 : 4), '\0');
    }
  }
  pieces.push_back({"plugin", -2, 0, 3, "f32", 0});
  pieces.push_back({"buffer", -3, 0, 2, "f32", 0});
  std::string blocks;
  for (std::size_t at = 0; at < data.size(); at += 65536) {
    std::array<char, 17> digits{};
    const std::size_t bytes = std::min<std::size_t>(65536, data.size() - at);
    std::snprintf(digits.data(), digits.size(), "%016llx",
                  static_cast<unsigned long long>(XXH3_64bits(data.data() + at, bytes)));
    blocks += digits.data();
  }
  const ordered_json manifest = {
      {"format", "tessera checkpoint"}, {"version", 1},     {"rank", 0},       {"bytes", data.size()},
      {"block_bytes", 65536},           {"pieces", pieces}, {"blocks", blocks}};
  const ordered_json index = {{"format", "tessera checkpoint"},
                              {"version", 1},
                              {"step", 1},
                              {"sequence", 1},
                              {"strategy", "fsdp"},
                              {"attributes",
                               {{"model", nn::config_json(small_model())},
                                {"lora", nn::lora_json(kLora, small_model(), "base")},
                                {"quantize", "nf4"}}},
                              {"finite", true},
                              {"tensors", tensors},
                              {"buffers", {{{"name", "buffer"}, {"shape", {2}}, {"dtype", "f32"}}}},
                              {"manifests", {""}}};
  Files files = {{kIndex, index.dump()}, {kManifest, manifest.dump()}, {"rank-00000.safetensors", data}};
  fit_hashes(files);
  return files;
}

Files result_files() {
  tools::StepTimeline step{.step = 5, .length_ns = 3'000'000, .pieces = {2, 2, 2}, .predicted_state = 800};
  step.ranks.push_back({0,
                        {{base::TraceEventKind::forward, "h.0", 0, 100, 10, 2'000'000}},
                        {{{"all_gather", "shard", 0, 100, 0, 5, 900}, 0}},
                        {{0, {200}}, {50, {200, 0, 0, 300}}}});
  tools::Comparison results{.model = "gpt-nano", .parameters = 10, .ranks = 2, .backend = "shm", .steps = 3};
  for (const char* strategy : {"ddp", "fsdp"}) {
    tools::RunResult run;
    run.strategy = strategy;
    run.mesh = {1, 2};
    run.units = {{.name = "h.0", .elements = 100, .padding = 4, .kept_after_forward = true, .peak_bytes = 500}};
    run.losses = {5.0, 4.5, 4.25};
    run.final_parameters_hash = "0123456789abcdef";
    run.step_ms_median = run.step_ms_p95 = 3;
    run.round_step_ms = {3, 4};
    run.evaluation = {4.0, 100};
    run.link = {1.0, 2.0, true};
    run.parts.emplace();
    run.timeline = step;
    results.runs.push_back(run);
  }
  results.rounds = 2;
  results.differences = {{"ddp", "fsdp", {1, 0.5, 2, 0.5}, "too few rounds to say"}};
  results.noise = {"a busy host"};
  const std::array parts = {tools::StepParts{.compute = 1}, tools::StepParts{.compute = 2}};
  results.why = tools::explain_gap({parts.data(), 1}, {parts.data() + 1, 1});
  results.what_if = tools::WhatIf{.machine = "x", .command = {"plan"}, .runs = {{"ddp", "ddp", 1, 2, {}, true, ""}}};
  return {{"run.json", to_json(results).dump()}};
}

Files flight_files() {
  namespace flight = comm::flight;
  flight::Header header{
      .magic = flight::kMagic, .entries = flight::kEntries, .entry_bytes = sizeof(flight::Entry), .reserved = {}};
  std::string bytes(flight::kTextOffset, '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  for (std::uint64_t number = 1; number <= 3; ++number) {
    flight::Entry entry{};
    entry.number = number;
    entry.state = number;
    entry.sequence = number;
    entry.bytes = 100;
    entry.issued_ns = static_cast<std::int64_t>(number);
    std::memcpy(bytes.data() + sizeof(header) + (number - 1) * sizeof(entry), &entry, sizeof(entry));
  }
  bytes +=
      "rank 0 of 2\nrun abc\nhost h\nbackend shm\nprocess 1\nclock 5 100\ncommunicator 0 world 0,1\n"
      "failure 7 1 Timeout: all_gather\nend 9 exception\n";
  return {{"rank-0.flight", bytes}};
}

// What reads them.

void read_model(const std::string& folder) {
  const nn::HfCheckpointReader reader(folder);
  const auto tensors = tools::dense_tensors(reader.config());
  reader.check(tensors);
  for (const nn::SafetensorsTensor& tensor : tensors) {
    std::vector<float> values(static_cast<std::size_t>(nn::count_of(tensor.shape)));
    reader.read(tensor.name, {0, nn::count_of(tensor.shape)}, values.data());
  }
}

void read_adapter(const std::string& folder) {
  const nn::PeftAdapterReader reader(folder);
  const auto tensors = adapter_tensors(small_model(), reader.options());
  reader.check(tensors);
  for (const nn::SafetensorsTensor& tensor : tensors) {
    std::vector<float> values(static_cast<std::size_t>(nn::count_of(tensor.shape)));
    reader.read(tensor.name, {0, nn::count_of(tensor.shape)}, values.data());
  }
}

/// As `checkpoint verify`, `checkpoint export` and `--resume` do.
void read_checkpoint(const std::string& folder) {
  fsdp::Checkpoint checkpoint(folder);
  checkpoint.verify();
  std::vector<float> values;
  for (const fsdp::CheckpointTensor& tensor : checkpoint.tensors())
    for (int what = fsdp::Checkpoint::kValue; what < tensor.states; ++what) {
      values.resize(static_cast<std::size_t>(nn::count_of(tensor.shape)));
      checkpoint.read(tensor.name, what, {0, nn::count_of(tensor.shape)}, values.data());
    }
  for (const fsdp::CheckpointBuffer& buffer : checkpoint.buffers()) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(nn::count_of(buffer.shape)) * size_of(buffer.dtype));
    checkpoint.read_buffer(buffer.name, bytes);
  }
  for (const auto& [name, count] : checkpoint.plugin_state(0)) {
    values.resize(count);
    checkpoint.read_plugin_state(0, name, values.data());
  }
  const nn::ModelConfig config = tools::model_in(folder);
  nn::LoraMerger merge(config, tools::lora_in(folder).value_or(kLora));
  for (const fsdp::CheckpointTensor& tensor : checkpoint.tensors()) {
    values.resize(static_cast<std::size_t>(nn::count_of(tensor.shape)));
    checkpoint.read(tensor.name, fsdp::Checkpoint::kValue, {0, nn::count_of(tensor.shape)}, values.data());
    if (nn::is_adapter(tensor.name)) merge.add(tensor.name, tensor.shape, values);
  }
  for (const nn::SafetensorsTensor& tensor : tools::dense_tensors(config)) {
    const std::int64_t count = std::min<std::int64_t>(nn::count_of(tensor.shape), 1 << 12);
    values.resize(static_cast<std::size_t>(count));
    merge.merge(tensor.name, {0, count}, values.data());
  }
  tools::check_saved(checkpoint, config);  // last, since it refuses what the rest must survive, too
}

void read_results(const std::string& folder) {
  const std::string path = folder + "/run.json";
  tools::pages::page({tools::parse_comparison(base::parse_json<nlohmann::json>(text_of(path), path), path)});
}

void read_flight(const std::string& folder) {
  std::vector<std::string> ignored;
  tools::find_first_divergence(tools::read_flight_logs(folder, ignored));
}

}  // namespace

std::vector<Subject> subjects() {
  return {
      {"a model", model_files(), read_model},
      {"an adapter", adapter_files(), read_adapter},
      {"a checkpoint", checkpoint_files(), read_checkpoint, fit_hashes},
      {"results", result_files(), read_results},
      {"records", flight_files(), read_flight},
      {"a cluster",
       {{"c.json", to_json(tools::cluster_presets().front()).dump()}},
       [](const std::string& folder) { tools::find_cluster(folder + "/c.json"); }},
  };
}

std::string broken_property(const Subject& subject, const Files& files) {
  const nn::test::TemporaryDirectory folder;
  for (const auto& [name, content] : files) folder.write(name, content);
  const auto begin = std::chrono::steady_clock::now();
  try {
    subject.read(folder.path());
  } catch (const base::Error& error) {
    constexpr std::size_t kLongest = 100'000;  // an error may name a value of the files
    if (std::string_view(error.what()).size() > kLongest) return subject.name + ": an error is too long";
  } catch (const std::exception& error) {
    return subject.name + ": another exception: " + error.what();
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return seconds.count() > 10 ? subject.name + ": it took too long" : "";
}

}  // namespace tessera::fuzz
