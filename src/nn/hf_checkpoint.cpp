#include "tessera/nn/hf_checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "tessera/base/atomic_file.h"
#include "tessera/nn/io/json_fields.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn {
namespace {

constexpr const char *kConfig = "/config.json", *kSingle = "/model.safetensors",
                     *kIndex = "/model.safetensors.index.json", *kHead = "lm_head.weight";
constexpr std::string_view kGpt2Prefix = "transformer.", kLlamaPrefix = "model.";

/// Files beside a model that training doesn't change.
constexpr const char* kCompanions[] = {"generation_config.json",
                                       "tokenizer.json",
                                       "tokenizer_config.json",
                                       "tokenizer.model",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "chat_template.jinja"};

/// The names of the files that an index lists.
std::set<std::string> files_of_index(const std::string& path) {
  const internal::Json json = internal::parse_object(internal::read_text(path, kMaxHeaderBytes), path, kMaxHeaderBytes);
  const internal::Fields fields(json, path);
  if (!fields.has("weight_map")) fields.fail("needs a 'weight_map'");
  std::set<std::string> names;
  for (const auto& [tensor, name] : fields.object("weight_map").items()) {
    if (!name.is_string()) fields.fail("the file of '" + tensor.substr(0, 100) + "' is not a name");
    const std::string file_name = name.get<std::string>();
    if (file_name.empty() || file_name.find('/') != std::string::npos || !file_name.ends_with(".safetensors"))
      fields.fail("'" + file_name.substr(0, 100) + "' is not the name of a safetensors file in the same directory");
    names.insert(file_name);
  }
  return names;
}

/// Constants that a model computes, and what other tools leave: transformers doesn't read them either.
bool ignored(const SafetensorsEntry& entry) {
  constexpr std::string_view kEnds[] = {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq",
                                        "rotary_emb.cos_cached", "rotary_emb.sin_cached"};
  return entry.count() == 0 ||
         std::ranges::any_of(kEnds, [&](std::string_view end) { return entry.name.ends_with(end); });
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
    : directory_(directory), config_(read_config(directory + kConfig)) {
  std::error_code ignore;
  const std::string single = directory + kSingle, index = directory + kIndex;
  if (std::filesystem::exists(single, ignore)) {
    add_file(single);
  } else if (std::filesystem::exists(index, ignore)) {
    for (const std::string& name : files_of_index(index)) add_file(directory + "/" + name);
  } else {
    throw InvalidUsage(directory + ": has neither model.safetensors nor model.safetensors.index.json");
  }
  if (static_cast<std::size_t>(config_.layers) > places_.size())  // modules of so many layers would take memory
    throw InvalidUsage(directory_ + ": does not fit the model: config.json has " + std::to_string(config_.layers) +
                       " layers, and the files have " + std::to_string(places_.size()) + " tensors");
  decide_tie();
}

std::string HfCheckpointReader::canonical(std::string_view name) const {
  const bool gpt2 = config_.family == ModelConfig::Family::gpt2;
  if (gpt2 && name.starts_with(kGpt2Prefix)) name.remove_prefix(kGpt2Prefix.size());
  return std::string(gpt2 || name.starts_with(kLlamaPrefix) || name == kHead ? "" : kLlamaPrefix) + std::string(name);
}

void HfCheckpointReader::add_file(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  for (const SafetensorsEntry& entry : files_.back()->entries()) {
    if (ignored(entry)) continue;
    if (!places_.emplace(canonical(entry.name), Place{files_.back().get(), &entry}).second)
      throw InvalidUsage(path + ": '" + canonical(entry.name).substr(0, 100) + "' appears twice");
  }
}

/// Follows transformers 5 if config.json ties the head to the embedding.
void HfCheckpointReader::decide_tie() {
  const auto head = places_.find(kHead);
  if (!config_.tied || head == places_.end()) return;
  const std::string name = config_.family == ModelConfig::Family::gpt2 ? "wte.weight" : "model.embed_tokens.weight";
  const auto [embedding, alone] = places_.emplace(name, head->second);
  const auto differs = [&](const std::string& what) {
    config_.note = directory_ + ": " + what + ", as by transformers 5";
  };
  if (alone) {
    differs(std::string(kHead) + " is used for the missing " + name);
  } else if (embedding->second.entry->shape != head->second.entry->shape) {
    throw InvalidUsage(directory_ + ": " + kHead + " has shape " + to_string(head->second.entry->shape) + ", and " +
                       name + " has " + to_string(embedding->second.entry->shape) +
                       ", but config.json ties them; set its 'tie_word_embeddings' to false, or remove one");
  } else if (!equal(embedding->second, head->second)) {
    config_.tied = false;
    return differs(std::string(kHead) + " differs from " + name + " and is used, although config.json ties them");
  }
  places_.erase(head);
}

bool HfCheckpointReader::equal(const Place& a, const Place& b) const {
  if (a.entry->dtype == b.entry->dtype && std::ranges::equal(a.file->bytes(*a.entry), b.file->bytes(*b.entry)))
    return true;
  constexpr std::int64_t kAtOnce = 1 << 16;
  std::vector<float> first(kAtOnce), second(kAtOnce);
  for (std::int64_t begin = 0; begin < a.entry->count(); begin += kAtOnce) {
    const ElementRange range{begin, std::min(begin + kAtOnce, a.entry->count())};
    a.file->read(*a.entry, range, first.data());
    b.file->read(*b.entry, range, second.data());
    if (!std::equal(first.begin(), first.begin() + range.count(), second.begin())) return false;
  }
  return true;
}

void HfCheckpointReader::check(const std::vector<SafetensorsTensor>& needed) const {
  std::vector<std::string> missing, unexpected, different, of_other_types;
  std::set<std::string_view> known;
  for (const SafetensorsTensor& tensor : needed) {
    known.insert(tensor.name);
    const auto found = places_.find(tensor.name);
    if (found == places_.end()) {
      missing.push_back(tensor.name);
    } else if (found->second.entry->shape != tensor.shape) {
      different.push_back(tensor.name + to_string(found->second.entry->shape) + " (needs " + to_string(tensor.shape) +
                          ")");
    } else if (!found->second.entry->holds(tensor.dtype)) {
      of_other_types.push_back(tensor.name + " of " + found->second.entry->dtype);
    }
  }
  for (const auto& [name, place] : places_)
    if (!known.contains(name)) unexpected.push_back(name);
  std::string wrong;
  if (!missing.empty()) wrong += "; missing: " + listed(missing);
  if (!different.empty()) wrong += "; of another shape: " + listed(different);
  if (!of_other_types.empty()) wrong += "; of another type: " + listed(of_other_types);
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

void HfCheckpointReader::read_whole(std::string_view name, DType dtype, std::span<std::byte> out) const {
  const Place& place = place_of(name);
  place.file->read_whole(*place.entry, dtype, out);
}

HfCheckpointWriter::HfCheckpointWriter(const std::string& directory, const ModelConfig& config,
                                       const std::vector<SafetensorsTensor>& tensors, std::string origin)
    : directory_(made_directory(directory)),
      origin_(std::move(origin)),
      config_(config),
      writer_(directory + kSingle,
              [&] {
                std::vector<SafetensorsTensor> named = tensors;
                for (SafetensorsTensor& tensor : named) tensor.name = written(tensor.name);
                return named;
              }(),
              {{"format", "pt"}}) {}

std::string HfCheckpointWriter::written(std::string_view name) const {
  const bool prefixed = config_.family == ModelConfig::Family::gpt2 && !config_.tied && name != kHead;
  return std::string(prefixed ? kGpt2Prefix : "") + std::string(name);
}

void HfCheckpointWriter::commit() {
  namespace fs = std::filesystem;
  std::error_code ignore;
  std::set<std::string> stale;
  const std::string index = directory_ + kIndex;
  if (fs::exists(index, ignore)) {
    try {
      stale = files_of_index(index);
    } catch (const InvalidUsage&) {  // a damaged index names nothing
    }
    stale.insert(kIndex + 1);
  }
  if (!origin_.empty() && !fs::equivalent(origin_, directory_, ignore))
    for (const char* name : kCompanions) copy_file_atomically(origin_ + "/" + name, directory_ + "/" + name);
  commit_described(directory_ + kConfig, config_json(config_), [&] { writer_.commit(); });
  stale.erase(kSingle + 1);
  for (const std::string& name : stale) fs::remove(directory_ + "/" + name, ignore);
}

}  // namespace tessera::nn
