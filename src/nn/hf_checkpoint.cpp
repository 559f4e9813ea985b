#include "tessera/nn/hf_checkpoint.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/nn/atomic_file.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn {
namespace {

constexpr std::string_view kPrefix = "transformer.";

std::string canonical(std::string_view name) {
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  return std::string(name);
}

/// "a b c and 4 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i) text += (i ? " " : "") + names[i].substr(0, 100);
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

}  // namespace

std::vector<SafetensorsTensor> saved_tensors(const Module& model) {
  std::vector<SafetensorsTensor> tensors;
  for (const auto& parameter : model.parameters()) tensors.push_back({parameter->name(), parameter->shape()});
  for (const auto& buffer : model.buffers())
    if (buffer->persistent()) tensors.push_back({buffer->name(), buffer->shape(), buffer->dtype()});
  return tensors;
}

HfCheckpointReader::HfCheckpointReader(const std::string& directory)
    : directory_(directory), config_(read_config(directory + "/config.json")) {
  std::error_code ignore;
  const std::string single = directory + "/model.safetensors", index = single + ".index.json";
  if (std::filesystem::exists(single, ignore)) {
    add_file(single);
  } else if (std::filesystem::exists(index, ignore)) {
    open_index(index);
  } else {
    throw InvalidUsage(directory + ": has neither model.safetensors nor model.safetensors.index.json");
  }
}

void HfCheckpointReader::open_index(const std::string& path) {
  const MappedFile file(path);
  const std::span<const std::byte> bytes = file.bytes();
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  if (bytes.size() > kMaxHeaderBytes) throw InvalidUsage(path + ": too long for an index");
  int deepest = 0;
  const auto shallow = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    return (deepest = std::max(deepest, depth)) < 8;
  };
  const auto json = nlohmann::json::parse(text, text + bytes.size(), shallow, false);
  if (!json.is_object() || deepest >= 8 || !json.contains("weight_map") || !json["weight_map"].is_object())
    throw InvalidUsage(path + ": needs a JSON object with a 'weight_map'");
  std::map<std::string, std::size_t> names;
  for (const auto& [tensor, name] : json["weight_map"].items()) {
    if (!name.is_string()) throw InvalidUsage(path + ": the file of '" + tensor.substr(0, 100) + "' is not a name");
    const std::string file_name = name.get<std::string>();
    if (file_name.empty() || file_name.find('/') != std::string::npos || !file_name.ends_with(".safetensors"))
      throw InvalidUsage(path + ": '" + file_name.substr(0, 100) +
                         "' is not the name of a safetensors file in the same directory");
    ++names[file_name];
  }
  for (const auto& [name, tensors] : names) add_file(directory_ + "/" + name);
}

void HfCheckpointReader::add_file(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  for (const SafetensorsEntry& entry : files_.back()->entries()) {
    if (ignored(entry.name)) continue;
    if (!places_.emplace(canonical(entry.name), Place{files_.back().get(), &entry}).second)
      throw InvalidUsage(path + ": '" + canonical(entry.name).substr(0, 100) + "' appears twice");
  }
}

bool HfCheckpointReader::ignored(std::string_view name) const {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq") || (config_.tied && name == "lm_head.weight");
}

void HfCheckpointReader::check(const std::vector<SafetensorsTensor>& needed) const {
  std::vector<std::string> missing, unexpected, different;
  std::set<std::string_view> known;
  for (const SafetensorsTensor& tensor : needed) {
    known.insert(tensor.name);
    const auto found = places_.find(tensor.name);
    if (found == places_.end()) {
      missing.push_back(tensor.name);
    } else if (found->second.entry->shape != tensor.shape) {
      different.push_back(tensor.name + to_string(found->second.entry->shape) + " (needs " + to_string(tensor.shape) +
                          ")");
    }
  }
  for (const auto& [name, place] : places_)
    if (!known.contains(name)) unexpected.push_back(name);
  std::string wrong;
  if (!missing.empty()) wrong += "; missing: " + listed(missing);
  if (!different.empty()) wrong += "; of another shape: " + listed(different);
  if (!unexpected.empty()) wrong += "; unexpected: " + listed(unexpected);
  if (!wrong.empty()) throw InvalidUsage(directory_ + ": does not fit the model" + wrong);
}

const HfCheckpointReader::Place& HfCheckpointReader::place_of(std::string_view name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) throw InvalidUsage(directory_ + ": has no tensor '" + std::string(name) + "'");
  return found->second;
}

void HfCheckpointReader::read(std::string_view name, ElementRange range, float* out) const {
  const Place& place = place_of(name);
  place.file->read(*place.entry, range, out);
}

void HfCheckpointReader::read_whole(std::string_view name, DType dtype, void* out) const {
  const Place& place = place_of(name);
  place.file->read_whole(*place.entry, dtype, out);
}

HfCheckpointWriter::HfCheckpointWriter(const std::string& directory, const ModelConfig& config,
                                       const std::vector<SafetensorsTensor>& tensors)
    : directory_(made_directory(directory)),
      config_(config),
      writer_(directory + "/model.safetensors", tensors, {{"format", "pt"}}) {}

void HfCheckpointWriter::commit() {
  commit_described(directory_ + "/config.json", config_json(config_), [&] { writer_.commit(); });
}

}  // namespace tessera::nn
