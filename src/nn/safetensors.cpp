#include "tessera/nn/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

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

std::size_t element_bytes(std::string_view dtype) {
  static constexpr std::pair<std::string_view, std::size_t> kTypes[] = {
      {"F32", 4},  {"F64", 8},     {"F16", 2},     {"BF16", 2},    {"I8", 1},  {"U8", 1},
      {"I16", 2},  {"U16", 2},     {"I32", 4},     {"U32", 4},     {"I64", 8}, {"U64", 8},
      {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"C64", 8}};
  for (const auto& [name, bytes] : kTypes)
    if (name == dtype) return bytes;
  return 0;
}

/// Depth 1: the object of tensors; 2: one tensor, or the metadata; 3: shape or data_offsets. Fields of a tensor that
/// the format doesn't have are skipped, whatever they hold, as by the reference implementation.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(SafetensorsHeader& header, const std::string& origin) : header_(header), origin_(origin) {}

  bool null() override { return (depth_ == 1 && entry_.name == kMetadata) || scalar("null"); }
  bool boolean(bool) override { return scalar("a boolean"); }
  bool number_float(number_float_t, const string_t&) override { return scalar("a fraction"); }
  bool binary(binary_t&) override { return scalar("binary"); }
  bool number_integer(number_integer_t) override { return scalar("a negative number"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (skips()) return true;
    if (numbers_ == nullptr) return scalar("a number");
    if (numbers_->size() >= kMaxDimensions)
      fail(where() + " has more than " + std::to_string(kMaxDimensions) + " numbers");
    if (value > static_cast<std::uint64_t>(INT64_MAX)) fail(where() + " holds " + std::to_string(value));
    numbers_->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  bool string(string_t& value) override {
    if (in_metadata_) {
      header_.metadata[field_] = value;
      return true;
    }
    if (skips() || depth_ != 2 || field_ != "dtype") return scalar("a string");
    entry_.dtype = value;
    return true;
  }
  bool key(string_t& name) override {
    if (skipped_ > 0) return true;
    if (depth_ == 1) {
      if (!names_.insert(name).second) fail("'" + shown(name) + "' appears twice");
      entry_ = {};
      entry_.name = name;
      offsets_.clear();
      fields_.clear();
      return true;
    }
    if (!fields_.insert(name).second) fail("'" + shown(entry_.name) + "' has '" + shown(name) + "' twice");
    field_ = name;
    return true;
  }
  bool start_object(std::size_t) override {
    if (skips()) return skip();
    if (++depth_ > 2) fail("the header is nested too deeply");
    in_metadata_ = depth_ == 2 && entry_.name == kMetadata;
    return true;
  }
  bool end_object() override {
    if (skipped_ > 0) return skipped_-- > 0;
    if (depth_-- == 2 && !in_metadata_) finish_entry();
    in_metadata_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    if (skips()) return skip();
    if (depth_ != 2 || in_metadata_ || numbers_ != nullptr) fail("the header has an unexpected array");
    if (field_ == "dtype") fail(where() + " is an array");
    numbers_ = field_ == "shape" ? &entry_.shape : &offsets_;
    return true;
  }
  bool end_array() override {
    if (skipped_ > 0) return skipped_-- > 0;
    numbers_ = nullptr;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail("the header is not JSON (at byte " + std::to_string(position) + ")");
  }

 private:
  static constexpr std::size_t kMaxDimensions = 32;
  static constexpr int kMaxSkipped = 64;  // depth
  static constexpr const char* kMetadata = "__metadata__";
  /// Inside a tensor, at or in the value of a field that the format doesn't have.
  bool skips() const {
    return skipped_ > 0 ||
           (depth_ == 2 && !in_metadata_ && field_ != "dtype" && field_ != "shape" && field_ != "data_offsets");
  }
  bool skip() {
    if (++skipped_ > kMaxSkipped) fail("the header is nested too deeply");
    return true;
  }
  [[noreturn]] void fail(const std::string& what) const { throw InvalidUsage(origin_ + ": " + what); }
  /// Names are file input: shortened, and without control characters.
  static std::string shown(const std::string& name) {
    std::string text = name.substr(0, 100);
    for (char& c : text)
      if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
    return text;
  }
  std::string where() const { return "'" + shown(field_) + "' of '" + shown(entry_.name) + "'"; }
  bool scalar(const char* what) const {
    if (skips()) return true;
    if (depth_ == 0) fail("the header is not a JSON object");
    if (depth_ == 1) fail("'" + shown(entry_.name) + "' is " + what + ", not a tensor");
    fail(where() + " is or holds " + what);
  }
  void finish_entry() {
    entry_.element_bytes = element_bytes(entry_.dtype);
    if (entry_.element_bytes == 0)
      fail("'" + shown(entry_.name) + "' has the unknown dtype '" + shown(entry_.dtype) + "'");
    if (!fields_.contains("shape") || offsets_.size() != 2)
      fail("'" + shown(entry_.name) + "' needs a shape and two data_offsets");
    entry_.begin = static_cast<std::uint64_t>(offsets_[0]);
    entry_.end = static_cast<std::uint64_t>(offsets_[1]);
    std::int64_t bytes = static_cast<std::int64_t>(entry_.element_bytes);
    bool zero = false;
    for (const std::int64_t extent : entry_.shape) zero = zero || extent == 0;
    for (const std::int64_t extent : entry_.shape)
      if (zero) {
        bytes = 0;
      } else if (__builtin_mul_overflow(bytes, extent, &bytes)) {
        fail("'" + shown(entry_.name) + "' has the invalid shape " + shape_text());
      }
    if (entry_.end < entry_.begin || entry_.end - entry_.begin != static_cast<std::uint64_t>(bytes))
      fail("'" + shown(entry_.name) + "' of " + entry_.dtype + shape_text() + " needs " + std::to_string(bytes) +
           " bytes, its offsets are " + std::to_string(entry_.begin) + " to " + std::to_string(entry_.end));
    header_.entries.push_back(std::move(entry_));
    entry_ = {};
  }
  std::string shape_text() const {
    std::string text = "[";
    for (std::size_t i = 0; i < entry_.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(entry_.shape[i]);
    return text + "]";
  }

  SafetensorsHeader& header_;
  const std::string& origin_;
  int depth_ = 0, skipped_ = 0;
  bool in_metadata_ = false;
  SafetensorsEntry entry_;
  Shape offsets_;
  Shape* numbers_ = nullptr;
  std::string field_;
  std::set<std::string> names_, fields_;
};

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

// The header of a safetensors file. A SAX parser detects excessive depth and duplicates before it builds any value.

SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes, const std::string& origin) {
  const std::size_t first = json.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos || json[first] != '{')
    throw InvalidUsage(origin + ": the header does not begin with '{'");
  if (const std::size_t zero = json.find('\0'); zero != std::string_view::npos)
    throw InvalidUsage(origin + ": the header is not JSON (byte " + std::to_string(zero) + " is zero)");
  SafetensorsHeader header;
  HeaderReader reader(header, origin);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  std::vector<const SafetensorsEntry*> order;
  for (const SafetensorsEntry& entry : header.entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  std::uint64_t at = 0;
  for (const SafetensorsEntry* entry : order) {  // the format allows no holes
    if (entry->begin != at)
      throw InvalidUsage(
          origin + ": '" + entry->name.substr(0, 100) + "' begins at byte " + std::to_string(entry->begin) +
          (entry->begin < at ? ", inside another tensor" : ", after a gap") + " (expected " + std::to_string(at) + ")");
    at = entry->end;
  }
  if (at != data_bytes)
    throw InvalidUsage(origin + ": the tensors take " + std::to_string(at) + " bytes, the file has " +
                       std::to_string(data_bytes) + (at > data_bytes ? " (truncated?)" : " (trailing data)"));
  return header;
}

}  // namespace tessera::nn
