// Checkpoint directories in the format of Hugging Face's transformers: config.json and model.safetensors, or several
// safetensors files with an index.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/models/config.h"
#include "tessera/nn/module.h"
#include "tessera/nn/safetensors.h"

namespace tessera::nn {

/// The tensors in a checkpoint of this model: its parameters in f32, and its persistent buffers in their own dtypes.
TESSERA_API std::vector<SafetensorsTensor> saved_tensors(const Module& model);

/// A checkpoint directory opened for reading. Tensors are found by canonical name, with or without the prefix
/// "transformer." of gpt2 or "model." of llama. Empty tensors, GPT-2's mask buffers, Llama's rotary tables and the copy
/// of a tied head are ignored. As in transformers 5, a head that differs from the embedding is not tied, whatever
/// config.json says, and a head without an embedding is also the embedding. Thread-safe.
class TESSERA_API HfCheckpointReader {
 public:
  /// Throws InvalidUsage if a file is missing or malformed.
  explicit HfCheckpointReader(const std::string& directory);
  const ModelConfig& config() const { return config_; }  ///< content of config.json, but tied only if the values are

  /// Throws InvalidUsage that names missing tensors, unexpected tensors, and tensors whose shape or type doesn't fit
  /// `needed`. Reads nothing but the headers.
  void check(const std::vector<SafetensorsTensor>& needed) const;
  /// Elements `range` of the tensor called `name`, as f32.
  void read(std::string_view name, ElementRange range, float* out) const;
  /// Reads the whole tensor without conversion. Throws InvalidUsage if its type is not `dtype`, or if `out` has another
  /// length.
  void read_whole(std::string_view name, DType dtype, std::span<std::byte> out) const;

 private:
  struct Place {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };
  const Place& place_of(std::string_view name) const;
  void add_file(const std::string& path);
  std::string canonical(std::string_view name) const;
  void decide_tie();
  bool equal(const Place& a, const Place& b) const;

  const std::string directory_;
  ModelConfig config_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place, std::less<>> places_;  // places by canonical name
};

/// Writes such a directory and creates it if it doesn't exist. The constructor receives all that is needed; ranges of
/// the tensors are then written in any order. gpt2 with a head of its own gets the prefix "transformer.", without which
/// transformers 4 refuses it.
class TESSERA_API HfCheckpointWriter {
 public:
  /// `origin`: the directory of the model that was trained, whose tokenizer and generation_config.json are copied; "":
  /// none. Throws InvalidUsage if the directory can't be created or written.
  HfCheckpointWriter(const std::string& directory, const ModelConfig& config,
                     const std::vector<SafetensorsTensor>& tensors, std::string origin = "");
  /// Elements `range` of an f32 tensor.
  void write(std::string_view name, ElementRange range, const float* values) {
    writer_.write(written(name), range, values);
  }
  /// A tensor of any dtype, at once. Throws InvalidUsage if it has another length.
  void write_whole(std::string_view name, std::span<const std::byte> values) {
    writer_.write_whole(written(name), values);
  }
  /// Completes the files, then removes an index and the files that it names, which would be read instead. Until then
  /// the directory's previous content stays unchanged. If the process is killed meanwhile, the directory may lack
  /// config.json, but never has that of another model.
  void commit();

 private:
  std::string written(std::string_view name) const;

  const std::string directory_, origin_;
  const ModelConfig config_;
  SafetensorsWriter writer_;
};

}  // namespace tessera::nn
