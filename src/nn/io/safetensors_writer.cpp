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
    if (!places_.emplace(tensor.name, Place{end, count, tensor.dtype}).second)
      throw InvalidUsage(path + ": two tensors are called '" + tensor.name + "'");
    const std::uint64_t begin = end;
    end += static_cast<std::uint64_t>(count) * size_of(tensor.dtype);
    header[tensor.name] = {
        {"dtype", safetensors_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // aligns the data
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xffU);
  for (auto& [name, place] : places_) place.offset += 8 + text.size();
  file_ = std::make_unique<AtomicFile>(std::move(path));
  text.insert(0, length);
  file_->write(0, text.data(), text.size());
}

SafetensorsWriter::~SafetensorsWriter() = default;

SafetensorsWriter::Place& SafetensorsWriter::place_of(std::string_view name) {
  const auto found = places_.find(name);
  if (found == places_.end())
    throw InvalidUsage(file_->path() + ": tensor '" + std::string(name) + "' was not declared");
  return found->second;
}

void SafetensorsWriter::write_whole(std::string_view name, std::span<const std::byte> values) {
  Place& place = place_of(name);
  if (values.size() != static_cast<std::size_t>(place.count) * size_of(place.dtype))
    throw InvalidUsage(file_->path() + ": " + std::to_string(values.size()) + " bytes for '" + std::string(name) +
                       "', which has " + std::to_string(place.count) + " elements of " + safetensors_name(place.dtype));
  file_->write(place.offset, values.data(), values.size());
  place.written += place.count;
}

void SafetensorsWriter::write(std::string_view name, ElementRange range, const float* values) {
  Place& place = place_of(name);
  if (place.dtype != DType::f32)
    throw InvalidUsage(file_->path() + ": '" + std::string(name) + "' was declared as " +
                       safetensors_name(place.dtype) + ", not F32");
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
