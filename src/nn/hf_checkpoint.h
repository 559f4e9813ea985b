// Folders as Hugging Face's transformers writes and reads them: config.json and model.safetensors, or several of these
// with an index.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/models/config.h"
#include "tessera/nn/module.h"
#include "tessera/nn/safetensors.h"

namespace tessera::nn {

/// What a folder of this model has: its parameters in f32, and its persistent buffers, as they are.
TESSERA_API std::vector<SafetensorsTensor> saved_tensors(const Module& model);

/// A folder opened for reading. Tensors are found by canonical name, with or without the prefix "transformer."; GPT-2's
/// mask buffers and Llama's rotary frequencies are ignored, and so is the copy of a tied head. Thread-safe.
class TESSERA_API HfCheckpointReader {
 public:
  /// Throws InvalidUsage for what is missing or malformed.
  explicit HfCheckpointReader(const std::string& folder);
  const ModelConfig& config() const { return config_; }

  /// Throws InvalidUsage that names what is missing, what is unexpected, and what has another shape than `needed`.
  void check(const std::vector<SafetensorsTensor>& needed) const;
  /// Elements `range` of the tensor called `name`, as f32.
  void read(std::string_view name, ElementRange range, float* out) const;
  /// All of it as it is. Throws InvalidUsage where it is of another type.
  void read_whole(std::string_view name, DType dtype, void* out) const;

 private:
  struct Place {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };
  const Place& place_of(std::string_view name) const;
  void add_file(const std::string& path);
  void open_index(const std::string& path);
  bool ignored(std::string_view name) const;

  const std::string folder_;
  const ModelConfig config_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place, std::less<>> places_;  // by canonical name
};

/// Writes such a folder, which is made where it doesn't exist: what is needed first, then any ranges of the tensors.
class TESSERA_API HfCheckpointWriter {
 public:
  /// Throws InvalidUsage where the folder can't be made or written.
  HfCheckpointWriter(const std::string& folder, const ModelConfig& config,
                     const std::vector<SafetensorsTensor>& tensors);
  void write(std::string_view name, ElementRange range, const float* values) { writer_.write(name, range, values); }
  void write_whole(std::string_view name, const void* values) { writer_.write_whole(name, values); }
  /// Until then, what was in the folder before stays.
  void commit();

 private:
  const std::string folder_;
  const ModelConfig config_;
  SafetensorsWriter writer_;
};

}  // namespace tessera::nn
