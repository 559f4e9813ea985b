#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tessera/base/file.h"
#include "tessera/fsdp/checkpoint/format.h"
#include "tessera/nn/safetensors.h"

namespace tessera::fsdp::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFormat = "tessera checkpoint";
constexpr int kVersion = 1;
constexpr std::size_t kDigits = 16;  // of a 64-bit hash

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

/// Runs `parse` and adds the file's name to errors about malformed text.
template <class Parse>
auto parsing(const std::string& origin, Parse&& parse) {
  try {
    return parse();
  } catch (const nlohmann::json::exception& error) {
    throw InvalidUsage(origin + ": damaged: " + error.what());
  } catch (const std::logic_error& error) {  // from std::stoull
    throw InvalidUsage(origin + ": damaged: not a number: " + error.what());
  }
}

void require_format(const ordered_json& json, const std::string& origin) {
  if (!json.is_object() || json.value("format", "") != kFormat) throw InvalidUsage(origin + ": not a checkpoint file");
  if (const int version = json.at("version"); version != kVersion)
    throw InvalidUsage(origin + ": has version " + std::to_string(version) + "; this program reads version " +
                       std::to_string(kVersion));
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
  return parsing(origin, [&] {
    const ordered_json json = ordered_json::parse(text);
    require_format(json, origin);
    if (json.at("block_bytes") != kBlock) throw InvalidUsage(origin + ": its block length is not supported");
    Manifest manifest{.rank = json.at("rank"), .file_bytes = json.at("bytes"), .blocks = {}, .slices = {}};
    const std::string blocks = json.at("blocks");
    if (blocks.size() != (manifest.file_bytes + kBlock - 1) / kBlock * kDigits)
      throw InvalidUsage(origin + ": its number of block hashes does not match its file");
    for (std::size_t i = 0; i < blocks.size(); i += kDigits)
      manifest.blocks.push_back(std::stoull(blocks.substr(i, kDigits), nullptr, 16));
    for (const ordered_json& p : json.at("pieces")) {
      TensorSlice slice{p.at(0), p.at(1), {p.at(2), p.at(3)}, base::parse_dtype(p.at(4).get<std::string>()), p.at(5)};
      if (slice.range.begin < 0 || slice.range.end < slice.range.begin || slice.offset > manifest.file_bytes ||
          slice.bytes() > manifest.file_bytes - slice.offset)
        throw InvalidUsage(origin + ": damaged: a range of '" + slice.tensor + "' lies outside its file");
      manifest.slices.push_back(std::move(slice));
    }
    return manifest;
  });
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
  return parsing(origin, [&] {
    ordered_json json = ordered_json::parse(text);
    require_format(json, origin);
    const std::string expected = json.at("xxh3");
    json.erase("xxh3");
    if (hash128(json.dump()) != expected) throw InvalidUsage(origin + ": damaged: its hash differs");
    Index index{.step = json.at("step"),
                .sequence = json.at("sequence"),
                .strategy = json.at("strategy"),
                .attributes = json.at("attributes"),
                .finite = json.value("finite", true),
                .apart = std::nullopt,
                .tensors = {},
                .buffers = {},
                .manifests = json.at("manifests")};
    if (json.contains("replicas_apart")) index.apart = json["replicas_apart"].get<bool>();
    for (const ordered_json& tensor : json.at("tensors"))
      index.tensors.push_back({tensor.at("name"), tensor.at("shape"), tensor.at("states"),
                               tensor.value("trained_since", std::uint64_t{0})});
    if (!json.contains("buffers")) return index;
    for (const ordered_json& buffer : json.at("buffers"))
      index.buffers.push_back(
          {buffer.at("name"), buffer.at("shape"), base::parse_dtype(buffer.at("dtype").get<std::string>())});
    return index;
  });
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
        {"dtype", nn::safetensors_name(slice.dtype)},
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

std::string read_text(const std::string& path) {
  base::FileText read = base::read_regular(path);
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
      steps.whole.push_back({entry.path().string(), parse_index(read_text(path), path)});
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
