#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tessera/base/file.h"
#include "tessera/base/json/json_reader.h"
#include "tessera/fsdp/checkpoint/format.h"

namespace tessera::fsdp::checkpoint {
namespace {

using base::JsonReader;
using nlohmann::ordered_json;

constexpr const char* kFormat = "tessera checkpoint";
constexpr int kVersion = 1;
constexpr std::size_t kDigits = 16;                         // of a 64-bit hash
constexpr int kMostStates = 16;                             // of an element; the optimizers have at most 3
constexpr std::int64_t kMostSteps = std::int64_t{1} << 40;  // as for --steps
constexpr std::int64_t kMostElements = std::int64_t{1} << 53;

std::string numbered(const char* prefix, std::uint64_t number, std::size_t width, const char* suffix) {
  std::string digits = std::to_string(number);
  if (digits.size() < width) digits.insert(0, width - digits.size(), '0');
  return prefix + digits + suffix;
}

std::string hexadecimal(std::uint64_t value) {
  std::string text(kDigits, '0');
  for (std::size_t i = 0; i < kDigits; ++i) text[kDigits - 1 - i] = "0123456789abcdef"[value >> (4 * i) & 15U];
  return text;
}

void require_format(const JsonReader& json, const std::string& origin) {
  if (!json.has("format") || json.at("format").text() != kFormat)
    throw InvalidUsage(origin + ": not a checkpoint file");
  if (const int version = json.at("version"); version != kVersion)
    throw InvalidUsage(origin + ": has version " + std::to_string(version) + "; this program reads version " +
                       std::to_string(kVersion));
}

std::uint64_t hash_at(std::string_view digits, const JsonReader& json) {
  std::uint64_t hash = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), hash, 16);
  if (error != std::errc() || end != digits.data() + digits.size()) json.fail("has a hash that is not hexadecimal");
  return hash;
}

/// Adds the place to the error of `parse`, such as "unknown dtype 'x'".
template <class Parse>
auto with_place(const JsonReader& json, Parse&& parse) {
  try {
    return parse();
  } catch (const InvalidUsage& error) {
    json.fail(std::string("is wrong: ") + error.what());
  }
}

/// The shape of a tensor whose elements can be counted.
Shape shape_at(const JsonReader& json) {
  Shape shape = json;
  with_place(json, [&] { return count_of(shape); });
  return shape;
}

DType dtype_at(const JsonReader& json) {
  const std::string name = json;
  return with_place(json, [&] { return base::parse_dtype(name); });
}

/// Whether the reader converts a dtype to f32.
bool is_widened(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::u8;
}

TensorSlice slice_at(const JsonReader& json, std::uint64_t file_bytes) {
  TensorSlice slice{.tensor = json.at(0),
                    .what = static_cast<int>(json.at(1).integer(kBuffer, kMostStates - 1)),
                    .range = {json.at(2).integer(0, kMostElements), json.at(3).integer(0, kMostElements)},
                    .dtype = dtype_at(json.at(4)),
                    .offset = json.at(5)};
  const std::uint64_t room = slice.offset > file_bytes ? 0 : (file_bytes - slice.offset) / size_of(slice.dtype);
  if (slice.range.count() < 0 || slice.offset > file_bytes || static_cast<std::uint64_t>(slice.range.count()) > room)
    json.fail("is a range of '" + slice.tensor + "' outside its file of " + std::to_string(file_bytes) + " bytes");
  if (slice.what == kPluginState ? slice.dtype != DType::f32 : slice.what != kBuffer && !is_widened(slice.dtype))
    json.fail("has the dtype " + std::string(name_of(slice.dtype)) + ", which no checkpoint has there");
  return slice;
}

/// Sorts by name. Throws if two have the same.
template <class Entry>
void sort_by_name(std::vector<Entry>& entries, const JsonReader& json) {
  std::ranges::sort(entries, {}, &Entry::name);
  const auto twice = std::ranges::adjacent_find(entries, {}, &Entry::name);
  if (twice != entries.end()) json.fail("has '" + twice->name + "' twice");
}

}  // namespace

std::string step_name(std::uint64_t step) { return numbered("step-", step, 8, ""); }
std::string data_name(int rank) { return numbered("rank-", static_cast<std::uint64_t>(rank), 5, ".safetensors"); }
std::string manifest_name(int rank) { return numbered("rank-", static_cast<std::uint64_t>(rank), 5, ".json"); }

std::uint64_t hash64(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }

std::string hash128(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return hexadecimal(hash.high64) + hexadecimal(hash.low64);
}

std::string to_text(const Manifest& manifest) {
  ordered_json json = {{"format", kFormat},
                       {"version", kVersion},
                       {"rank", manifest.rank},
                       {"bytes", manifest.file_bytes},
                       {"block_bytes", kBlock}};
  json["pieces"] = ordered_json::array();
  for (const TensorSlice& slice : manifest.slices)
    json["pieces"].push_back(
        {slice.tensor, slice.what, slice.range.begin, slice.range.end, name_of(slice.dtype), slice.offset});
  std::string blocks;
  for (const std::uint64_t block : manifest.blocks) blocks += hexadecimal(block);
  json["blocks"] = blocks;
  return json.dump() + "\n";
}

Manifest parse_manifest(const std::string& text, const std::string& origin) {
  const auto document = base::parse_json<nlohmann::json>(text, origin + ":");
  const JsonReader json(document, origin);
  require_format(json, origin);
  if (json.at("block_bytes").get<std::size_t>() != kBlock)
    throw InvalidUsage(origin + ": its block length is not supported");
  Manifest manifest{.rank = json.at("rank"), .file_bytes = json.at("bytes"), .blocks = {}, .slices = {}};
  const std::string blocks = json.at("blocks");
  if (blocks.size() != (manifest.file_bytes + kBlock - 1) / kBlock * kDigits)
    throw InvalidUsage(origin + ": its number of block hashes does not match its file");
  for (std::size_t i = 0; i < blocks.size(); i += kDigits)
    manifest.blocks.push_back(hash_at(std::string_view(blocks).substr(i, kDigits), json.at("blocks")));
  for (const JsonReader& piece : json.at("pieces").elements())
    manifest.slices.push_back(slice_at(piece, manifest.file_bytes));
  return manifest;
}

std::string to_text(const Index& index) {
  ordered_json json = {{"format", kFormat},          {"version", kVersion},        {"step", index.step},
                       {"sequence", index.sequence}, {"strategy", index.strategy}, {"attributes", index.attributes},
                       {"finite", index.finite}};
  if (index.apart) json["replicas_apart"] = *index.apart;
  json["tensors"] = ordered_json::array();
  for (const CheckpointTensor& tensor : index.tensors)
    json["tensors"].push_back({{"name", tensor.name},
                               {"shape", tensor.shape},
                               {"states", tensor.states},
                               {"trained_since", tensor.trained_since}});
  for (const CheckpointBuffer& buffer : index.buffers)
    json["buffers"].push_back({{"name", buffer.name}, {"shape", buffer.shape}, {"dtype", name_of(buffer.dtype)}});
  json["manifests"] = index.manifests;
  json["xxh3"] = hash128(json.dump());
  return json.dump(1) + "\n";
}

Index parse_index(const std::string& text, const std::string& origin) {
  auto ordered = base::parse_json<ordered_json>(text, origin + ":");
  const nlohmann::json document = ordered;
  const JsonReader json(document, origin);
  require_format(json, origin);
  ordered.erase("xxh3");
  if (hash128(ordered.dump()) != json.at("xxh3").text()) throw InvalidUsage(origin + ": damaged: its hash differs");
  Index index{.step = static_cast<std::uint64_t>(json.at("step").integer(0, kMostSteps)),
              .sequence = json.at("sequence"),
              .strategy = json.at("strategy"),
              .attributes = json.at("attributes"),
              .finite = json.value("finite", true),
              .apart = std::nullopt,
              .tensors = {},
              .buffers = {},
              .manifests = json.at("manifests")};
  if (json.has("replicas_apart")) index.apart = json.at("replicas_apart").flag();
  for (const JsonReader& tensor : json.at("tensors").elements())
    index.tensors.push_back({tensor.at("name"), shape_at(tensor.at("shape")),
                             static_cast<int>(tensor.at("states").integer(0, kMostStates)),
                             tensor.value("trained_since", std::uint64_t{0})});
  for (std::size_t i = 0; i < index.tensors.size(); ++i)
    if (index.tensors[i].trained_since > index.step) json.at("tensors").at(i).fail("is trained since a later step");
  sort_by_name(index.tensors, json.at("tensors"));
  if (!json.has("buffers")) return index;
  for (const JsonReader& buffer : json.at("buffers").elements())
    index.buffers.push_back({buffer.at("name"), shape_at(buffer.at("shape")), dtype_at(buffer.at("dtype"))});
  sort_by_name(index.buffers, json.at("buffers"));
  return index;
}

std::string lay_out(std::vector<TensorSlice>& slices) {
  ordered_json header = {{"__metadata__", {{"format", kFormat}}}};
  std::uint64_t end = 0;
  for (TensorSlice& slice : slices) {
    slice.offset = end;
    end += slice.bytes();
    // A name consists of the kind, the parameter and the first element.
    const std::string what = slice.what == Checkpoint::kValue ? "value"
                             : slice.what == kPluginState     ? "carried"
                             : slice.what == kBuffer          ? "buffer"
                                                              : "state" + std::to_string(slice.what);
    header[what + "/" + slice.tensor + "@" + std::to_string(slice.range.begin)] = {
        {"dtype", safetensors_name(slice.dtype)},
        {"shape", {slice.range.count()}},
        {"data_offsets", {slice.offset, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data begins aligned
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xffU);
  text.insert(0, length);
  for (TensorSlice& slice : slices) slice.offset += text.size();
  return text;
}

std::string read_text(const std::string& path, std::uint64_t limit) {
  base::FileText read = base::read_regular(path, limit);
  if (!read.problem.empty()) throw InvalidUsage(path + ": can't be read: " + read.problem);
  return std::move(read.text);
}

const FoundStep* StepList::newest_finite() const {
  const auto found =
      std::find_if(whole.rbegin(), whole.rend(), [](const FoundStep& step) { return step.index.finite; });
  return found == whole.rend() ? nullptr : &*found;
}

namespace {

/// The complete steps of one listing. `changing` is set if a run was saving or removing steps meanwhile.
StepList list_steps(const std::string& directory, bool& changing) {
  StepList steps;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("step-", 0) != 0) continue;
    if (name.ends_with(kPartial)) {
      changing = true;
      continue;
    }
    try {
      const std::string path = entry.path().string() + "/" + kIndex;
      steps.whole.push_back({entry.path().string(), parse_index(read_text(path, kMaxIndexBytes), path)});
    } catch (const InvalidUsage& problem) {
      if (std::filesystem::exists(entry.path(), error))
        steps.damaged.emplace_back(problem.what());
      else
        changing = true;  // removed since the directory was listed
    }
  }
  return steps;
}

}  // namespace

StepList find_steps(const std::string& directory) {
  // A run that saves may remove the listed step before the listing contains the newer one: then another listing does.
  constexpr int kMaxListings = 20;
  StepList steps;
  bool changing = true;
  for (int i = 0; i < kMaxListings && changing && steps.whole.empty() && steps.damaged.empty(); ++i) {
    changing = false;
    steps = list_steps(directory, changing);
  }
  // While a step is replaced, both versions exist for a moment: the new one counts.
  std::sort(steps.whole.begin(), steps.whole.end(),
            [](const FoundStep& a, const FoundStep& b) { return a.index.sequence < b.index.sequence; });
  return steps;
}

}  // namespace tessera::fsdp::checkpoint
