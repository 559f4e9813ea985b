// Adapter directories in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/nn/lora.h"
#include "tessera/nn/safetensors.h"

namespace tessera::nn {

/// The text of an adapter_config.json; `base`: the name or path of the adapter's base model.
TESSERA_API std::string lora_json(const LoraOptions& options, const ModelConfig& config, const std::string& base);
/// Parses an adapter_config.json. Throws InvalidUsage that names the field if it is no plain LoRA, or if it has a
/// field that is not known to have no effect; `origin` names the text in errors. Ignores adapter dropout, which
/// concerns only the training that wrote the adapter.
TESSERA_API LoraOptions parse_lora(std::string_view text, const std::string& origin);

/// An adapter directory opened for reading. Thread-safe.
class TESSERA_API PeftAdapterReader {
 public:
  /// Throws InvalidUsage if a file is missing or malformed.
  explicit PeftAdapterReader(const std::string& directory);
  const LoraOptions& options() const { return options_; }  ///< options of adapter_config.json
  /// `needed`: the adapters' parameters. Throws InvalidUsage that names tensors that are missing, of another shape, or
  /// unexpected.
  void check(const std::vector<SafetensorsTensor>& needed) const;
  /// Elements `range` of the parameter called `name`, as f32.
  void read(std::string_view name, ElementRange range, float* out) const;

 private:
  const std::string directory_;
  const LoraOptions options_;
  const SafetensorsFile file_;
  std::map<std::string, const SafetensorsEntry*, std::less<>> places_;  // places by the parameter's name
};

/// Writes such a directory and creates it if it doesn't exist.
class TESSERA_API PeftAdapterWriter {
 public:
  /// `tensors`: the adapters' parameters.
  PeftAdapterWriter(const std::string& directory, std::string json, const ModelConfig& config,
                    const std::vector<SafetensorsTensor>& tensors);
  /// Writes elements `range` of the parameter called `name`.
  void write(std::string_view name, ElementRange range, const float* values);
  /// Completes the files. Until then the directory's previous content stays unchanged.
  void commit();

 private:
  const std::string directory_, json_, prefix_;
  SafetensorsWriter writer_;
};

}  // namespace tessera::nn
