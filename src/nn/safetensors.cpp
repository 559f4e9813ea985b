#include "tessera/nn/safetensors.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tessera/nn/tensor.h"

namespace tessera::nn {
namespace {

template <class T>
void convert(const std::byte* from, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<float>(value);
  }
}

std::uint64_t little_endian(const std::byte* bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8U | std::to_integer<std::uint64_t>(bytes[i]);
  return value;
}

}  // namespace

bool SafetensorsEntry::holds(DType other) const {
  const bool floating = dtype == "F32" || dtype == "F64" || dtype == "F16" || dtype == "BF16";
  return other == DType::f32 ? floating : dtype == safetensors_name(other);
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const std::span<const std::byte> bytes = file_.bytes();
  if (bytes.size() < 8)
    throw InvalidUsage(path + ": " + std::to_string(bytes.size()) + " bytes are too few for a safetensors file");
  const std::uint64_t length = little_endian(bytes.data());
  if (length > kMaxHeaderBytes || length > bytes.size() - 8)
    throw InvalidUsage(path + ": a header of " + std::to_string(length) + " bytes in a file of " +
                       std::to_string(bytes.size()) + " (truncated, or not a safetensors file)");
  data_begin_ = 8 + static_cast<std::size_t>(length);
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + 8;
  header_ = parse_safetensors_header({text, static_cast<std::size_t>(length)}, bytes.size() - data_begin_, path);
  for (std::size_t i = 0; i < header_.entries.size(); ++i) index_.emplace(header_.entries[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.entries[found->second];
}

std::span<const std::byte> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  return file_.bytes().subspan(data_begin_ + entry.begin, entry.end - entry.begin);
}

void SafetensorsFile::read(const SafetensorsEntry& entry, ElementRange range, float* out) const {
  if (range.begin < 0 || range.begin > range.end || range.end > entry.count())
    throw InvalidUsage(path() + ": elements " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
                       " of '" + entry.name + "', which has " + std::to_string(entry.count()));
  if (range.count() == 0) return;
  const std::byte* from = bytes(entry).data() + static_cast<std::size_t>(range.begin) * entry.element_bytes;
  if (entry.dtype == "F32") return convert<float>(from, range.count(), out);
  if (entry.dtype == "F64") return convert<double>(from, range.count(), out);
  if (entry.dtype == "F16") return convert<f16>(from, range.count(), out);
  if (entry.dtype == "BF16") return convert<bf16>(from, range.count(), out);
  throw InvalidUsage(path() + ": '" + entry.name + "' is " + entry.dtype + ", needs a floating-point type");
}

void SafetensorsFile::read_whole(const SafetensorsEntry& entry, DType dtype, std::span<std::byte> out) const {
  if (entry.dtype != safetensors_name(dtype))
    throw InvalidUsage(path() + ": '" + entry.name + "' is " + entry.dtype + ", needs " + safetensors_name(dtype));
  const std::span<const std::byte> from = bytes(entry);
  if (from.size() != out.size())
    throw InvalidUsage(path() + ": '" + entry.name + "' has " + std::to_string(from.size()) + " bytes, needs " +
                       std::to_string(out.size()));
  std::ranges::copy(from, out.begin());
}

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
