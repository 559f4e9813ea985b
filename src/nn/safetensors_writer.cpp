#include <nlohmann/json.hpp>

#include "tessera/nn/safetensors.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn {

SafetensorsWriter::SafetensorsWriter(std::string path, const std::vector<SafetensorsTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t end = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const std::int64_t count = count_of(tensor.shape);
    if (!places_.emplace(tensor.name, Place{end, count, 0}).second)
      throw InvalidUsage(path + ": two tensors are called '" + tensor.name + "'");
    const std::uint64_t begin = end;
    end += static_cast<std::uint64_t>(count) * sizeof(float);
    header[tensor.name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data begins aligned
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xffU);
  for (auto& [name, place] : places_) place.offset += 8 + text.size();
  file_ = std::make_unique<AtomicFile>(std::move(path));
  text.insert(0, length);
  file_->write(0, text.data(), text.size());
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(std::string_view name, ElementRange range, const float* values) {
  const auto found = places_.find(name);
  if (found == places_.end())
    throw InvalidUsage(file_->path() + ": no tensor '" + std::string(name) + "' was announced");
  Place& place = found->second;
  if (range.begin < 0 || range.begin > range.end || range.end > place.count)
    throw InvalidUsage(file_->path() + ": elements " + std::to_string(range.begin) + " to " +
                       std::to_string(range.end) + " of '" + std::string(name) + "', which has " +
                       std::to_string(place.count));
  file_->write(place.offset + static_cast<std::uint64_t>(range.begin) * sizeof(float), values,
               static_cast<std::size_t>(range.count()) * sizeof(float));
  place.written += range.count();
}

void SafetensorsWriter::commit() {
  for (const auto& [name, place] : places_)
    if (place.written != place.count)
      throw InvalidUsage(file_->path() + ": " + std::to_string(place.written) + " of " + std::to_string(place.count) +
                         " elements of '" + name + "' were written");
  file_->commit();
}

}  // namespace tessera::nn
