// tessera checkpoint: shows the content of a checkpoint, checks that it is complete, and converts it to a Hugging Face
// directory. Needs no ranks.
#include "tessera/fsdp/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/nn/hf_checkpoint.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/tensor.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/train/model_files.h"
#include "tools/train/run_checkpointer.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

struct CheckpointCommand {
  std::string directory, json, output;
  bool tensors = false;
};

/// What a model that is made of its parameters is not.
std::vector<std::string> warnings_of(const fsdp::Checkpoint& checkpoint) {
  std::vector<std::string> lines;
  if (!checkpoint.finite()) lines.emplace_back("some values are not finite: the training had diverged");
  if (checkpoint.replicas_apart().value_or(false))
    lines.push_back(
        fmt::format("its replicas had trained on their own since they were synchronized: the parameters are "
                    "those of that sync, before step {}; train --export writes those of the end",
                    checkpoint.step()));
  return lines;
}

int inspect(const CheckpointCommand& options) {
  check_outputs({{"--json", options.json}}, {options.directory + "/latest"});
  const fsdp::Checkpoint checkpoint(options.directory);
  std::int64_t parameters = 0, states = 0;
  ordered_json tensors = ordered_json::array();
  for (const fsdp::CheckpointTensor& tensor : checkpoint.tensors()) {
    parameters += nn::count_of(tensor.shape);
    states += nn::count_of(tensor.shape) * tensor.states;
    tensors.push_back({{"name", tensor.name}, {"shape", tensor.shape}, {"states", tensor.states}});
  }
  print_clean("{}: step {}, written by {} ranks under {}\n", checkpoint.directory(), checkpoint.step(),
              checkpoint.ranks(), checkpoint.strategy());
  print_clean("{} tensors, {} parameters, {} values of the optimizer\n", checkpoint.tensors().size(), parameters,
              states);
  for (const std::string& line : warnings_of(checkpoint)) print_clean("{}\n", line);
  if (!checkpoint.buffers().empty()) print_clean("{} buffers\n", checkpoint.buffers().size());
  ordered_json buffers = ordered_json::array();
  for (const fsdp::CheckpointBuffer& buffer : checkpoint.buffers())
    buffers.push_back({{"name", buffer.name}, {"shape", buffer.shape}, {"dtype", base::name_of(buffer.dtype)}});
  for (const auto& [name, value] : checkpoint.attributes())
    if (value.find('\n') == std::string::npos) print_clean("{}: {}\n", name, value);
  if (options.tensors) {
    for (const fsdp::CheckpointTensor& tensor : checkpoint.tensors())
      print_clean("{} [{}]\n", tensor.name, fmt::join(tensor.shape, ", "));
    for (const fsdp::CheckpointBuffer& buffer : checkpoint.buffers())
      print_clean("{} [{}] {}, a buffer\n", buffer.name, fmt::join(buffer.shape, ", "), base::name_of(buffer.dtype));
  }
  write_json(options.json, {{"folder", checkpoint.directory()},
                            {"step", checkpoint.step()},
                            {"ranks", checkpoint.ranks()},
                            {"strategy", checkpoint.strategy()},
                            {"finite", checkpoint.finite()},
                            {"replicas_apart", checkpoint.replicas_apart().value_or(false)},
                            {"attributes", checkpoint.attributes()},
                            {"parameters", parameters},
                            {"tensors", tensors},
                            {"buffers", buffers}});
  return 0;
}

int verify(const CheckpointCommand& options) {
  fsdp::Checkpoint checkpoint(options.directory);
  const std::vector<std::string> wrong = checkpoint.verify();
  for (const std::string& line : wrong) print_clean("{}\n", line);
  if (!wrong.empty())
    throw CheckFailed(fmt::format("{}: {} blocks do not match their hashes; the first: {}", checkpoint.directory(),
                                  wrong.size(), wrong.front()));
  print_clean("{}: whole, {} bytes of {} ranks\n", checkpoint.directory(), checkpoint.bytes_read(), checkpoint.ranks());
  return 0;
}

/// The complete adapters; nothing if all parameters were trained.
std::optional<nn::LoraMerger> adapters_in(fsdp::Checkpoint& checkpoint, const nn::ModelConfig& model) {
  const std::optional<nn::LoraOptions> lora = lora_in(checkpoint.directory());
  if (!lora) return std::nullopt;
  nn::LoraMerger merge(model, *lora);
  std::vector<float> values;
  for (const fsdp::CheckpointTensor& tensor : checkpoint.tensors()) {
    if (!nn::is_adapter(tensor.name)) continue;
    values.resize(static_cast<std::size_t>(nn::count_of(tensor.shape)));
    checkpoint.read(tensor.name, fsdp::Checkpoint::kValue, {0, nn::count_of(tensor.shape)}, values.data());
    merge.add(tensor.name, tensor.shape, values);
  }
  return merge;
}

/// Holds one chunk of a tensor at a time in memory and merges adapters.
int export_directory(const CheckpointCommand& options) {
  constexpr std::int64_t kAtOnce = std::int64_t{4} << 20;  // elements
  fsdp::Checkpoint checkpoint(options.directory);
  check_directory("--output", options.output, "config.json");
  for (const std::string& line : warnings_of(checkpoint))
    print_clean(stderr, "tessera: {}: {}\n", checkpoint.directory(), line);
  const nn::ModelConfig model = model_in(options.directory);
  check_saved(checkpoint, model);
  const std::vector<nn::SafetensorsTensor> tensors = dense_tensors(model);
  const std::optional<nn::LoraMerger> merge = adapters_in(checkpoint, model);
  const bool quantized = quantized_in(options.directory);
  nn::HfCheckpointWriter writer(options.output, model, tensors, origin_in(options.directory));
  std::vector<float> values, numbers;
  for (const fsdp::CheckpointTensor& tensor : checkpoint.tensors()) {
    if (nn::is_adapter(tensor.name)) continue;
    const auto found = std::ranges::find(tensors, tensor.name, &nn::SafetensorsTensor::name);
    const bool encoded = quantized && found->shape != tensor.shape;  // read whole: any part depends on what precedes it
    if (encoded) {
      numbers.resize(static_cast<std::size_t>(nn::count_of(tensor.shape)));
      checkpoint.read(tensor.name, fsdp::Checkpoint::kValue, {0, nn::count_of(tensor.shape)}, numbers.data());
    }
    const std::int64_t count = nn::count_of(found->shape);
    for (std::int64_t begin = 0; begin < count; begin += kAtOnce) {
      const nn::ElementRange range{begin, std::min(count, begin + kAtOnce)};
      values.resize(static_cast<std::size_t>(range.count()));
      if (encoded) {
        decode_numbers(numbers, found->shape, range, values.data());
      } else {
        checkpoint.read(tensor.name, fsdp::Checkpoint::kValue, range, values.data());
      }
      if (merge) merge->merge(tensor.name, range, values.data());
      writer.write(tensor.name, range, values.data());
    }
  }
  std::vector<std::byte> whole;
  for (const fsdp::CheckpointBuffer& buffer : checkpoint.buffers()) {
    if (nn::is_fp8_state(buffer.name)) continue;
    whole.resize(static_cast<std::size_t>(nn::count_of(buffer.shape)) * base::size_of(buffer.dtype));
    checkpoint.read_buffer(buffer.name, whole);
    writer.write_whole(buffer.name, whole);
  }
  writer.commit();
  print_clean("{}: {} tensors of step {}\n", options.output, tensors.size(), checkpoint.step());
  return 0;
}

}  // namespace

void add_checkpoint(CommandLine& commands) {
  CLI::App* command =
      commands.app.add_subcommand("checkpoint", "inspect, verify or export a checkpoint of train --save");
  command->require_subcommand(1);
  const auto options = std::make_shared<CheckpointCommand>();
  const auto add = [&](const char* name, const char* help, int (*run)(const CheckpointCommand&)) {
    CLI::App* part = command->add_subcommand(name, help);
    add_option(*part, "folder", options->directory, "directory of checkpoints (the newest one is used) or of one step",
               "DIR")
        ->required();
    part->callback([&commands, options, run] { commands.chosen = [options, run] { return run(*options); }; });
    return part;
  };
  CLI::App* inspecting = add("inspect", "show the step, the ranks that saved it, and what is saved", inspect);
  inspecting->add_flag("--tensors", options->tensors, "also list the tensors");
  add_option(*inspecting, "--json", options->json, "write everything as JSON", "FILE");
  add("verify", "read every block and compare it with its hash", verify);
  add("export", "write the parameters as a Hugging Face directory", export_directory)
      ->add_option("-o,--output", options->output, "directory to write")
      ->type_name("DIR")
      ->required();
}

}  // namespace tessera::tools
