// Reading: finds the bytes and files of a range, and verifies that they are what was written.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "tessera/base/file.h"
#include "tessera/fsdp/checkpoint/format.h"

namespace tessera::fsdp {

using checkpoint::kBlock;
using checkpoint::Manifest;
using checkpoint::TensorSlice;
namespace fs = std::filesystem;

namespace {

/// One rank's file, read in whole blocks.
class DataFile {
 public:
  DataFile(std::string path, const Manifest& manifest) : path_(std::move(path)), manifest_(manifest) {
    base::OpenedFile file = base::open_regular(path_);
    if (!file.fd) throw InvalidUsage(path_ + ": can't be opened (" + file.problem + ")");
    if (file.bytes != manifest_.file_bytes)
      throw InvalidUsage(path_ + ": has " + std::to_string(file.bytes) + " bytes instead of " +
                         std::to_string(manifest_.file_bytes));
    file_ = std::move(file.fd);
  }

  std::size_t blocks() const { return manifest_.blocks.size(); }

  /// The length of blocks [first, last): the last of the file may be shorter.
  std::size_t bytes_of(std::size_t first, std::size_t last) const {
    return static_cast<std::size_t>(std::min<std::uint64_t>(last * kBlock, manifest_.file_bytes) - first * kBlock);
  }
  /// Reads blocks [first, last). Throws InvalidUsage if the file is shorter than when it was written.
  void read(std::size_t first, std::size_t last, std::byte* out) const {
    const std::uint64_t begin = first * kBlock;
    const std::size_t bytes = bytes_of(first, last);
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t got = ::pread(file_.get(), out + done, bytes - done, static_cast<off_t>(begin + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0)
        throw InvalidUsage(path_ + ": can't be read (" + (got < 0 ? std::strerror(errno) : "too short") + ")");
      done += static_cast<std::size_t>(got);
    }
  }
  /// Returns those of blocks [first, last), stored at `data`, whose hash differs.
  std::vector<std::size_t> damaged(std::size_t first, std::size_t last, const std::byte* data) const {
    std::vector<std::size_t> wrong;
    for (std::size_t block = first; block < last; ++block, data += kBlock)
      if (checkpoint::hash64(data, bytes_of(block, block + 1)) != manifest_.blocks[block]) wrong.push_back(block);
    return wrong;
  }
  /// The tensors in a block.
  std::string tensors_in(std::size_t block) const {
    std::string names;
    for (const TensorSlice& slice : manifest_.slices)
      if (slice.offset < (block + 1) * kBlock && slice.offset + slice.bytes() > block * kBlock &&
          names.find("'" + slice.tensor + "'") == std::string::npos)
        names += (names.empty() ? "'" : ", '") + slice.tensor + "'";
    return names.empty() ? "its header" : names;
  }
  std::string describe(std::size_t block) const {
    return path_ + ": damaged: block " + std::to_string(block) + " (64 KiB from byte " +
           std::to_string(block * kBlock) + ") of " + tensors_in(block) + " does not match its hash";
  }

 private:
  const std::string path_;
  const Manifest& manifest_;
  base::UniqueFd file_;
};

void widen(DType dtype, const std::vector<std::byte>& from, float* out) {
  if (dtype == DType::u8) {
    std::transform(from.begin(), from.end(), out, [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
    return;
  }
  for (std::size_t i = 0; i < from.size() / 2; ++i) {
    const auto bits = static_cast<std::uint16_t>(std::to_integer<unsigned>(from[2 * i]) |
                                                 std::to_integer<unsigned>(from[2 * i + 1]) << 8);
    out[i] = dtype == DType::bf16 ? base::bf16::to_float(bits) : base::f16::to_float(bits);
  }
}

/// The directory of a step: `directory`, or the newest step in it.
std::string resolve(const std::string& directory) {
  if (fs::exists(fs::path(directory) / checkpoint::kIndex)) return directory;
  if (!fs::is_directory(directory)) throw InvalidUsage(directory + ": no such directory");
  std::string newest = latest_checkpoint(directory);
  if (newest.empty()) throw InvalidUsage(directory + ": contains no complete checkpoint");
  return newest;
}

template <class Entry>
bool names(const std::vector<Entry>& sorted, const std::string& name) {
  return std::ranges::binary_search(sorted, name, {}, &Entry::name);
}

/// The file's text, or "" if it cannot be read.
std::string text_or_none(const std::string& path) {
  try {
    return checkpoint::read_text(path, checkpoint::kMaxIndexBytes);
  } catch (const InvalidUsage&) {
    return "";
  }
}

}  // namespace

struct Checkpoint::State {
  struct Place {
    std::size_t file = 0;
    const TensorSlice* slice = nullptr;
  };
  std::string directory;
  checkpoint::Index index;
  std::vector<Manifest> manifests;  // must not move: files refer to them
  std::vector<std::unique_ptr<DataFile>> files;
  std::map<std::pair<std::string, int>, std::vector<Place>> places;  // in order of their ranges
  std::uint64_t bytes_read = 0;
  std::vector<std::byte> edge;  // a partially wanted block

  /// Opens the files of the step whose index is `text`. Throws InvalidUsage.
  void open(const std::string& text);
  void compare_with_index() const;
  /// Reads elements `range` of the slice at `place`.
  void read(const Place& place, ElementRange range, float* out);
  void read_bytes(const DataFile& file, std::uint64_t begin, std::uint64_t end, std::byte* out);
};

void Checkpoint::State::open(const std::string& text) {
  index = checkpoint::parse_index(text, directory + "/" + checkpoint::kIndex);
  for (std::size_t rank = 0; rank < index.manifests.size(); ++rank) {
    const std::string list = directory + "/" + checkpoint::manifest_name(static_cast<int>(rank));
    const std::string data = directory + "/" + checkpoint::data_name(static_cast<int>(rank));
    // It has 16 characters for each block of the data.
    const std::uint64_t limit = checkpoint::kMaxIndexBytes + base::open_regular(data).bytes / (kBlock / 32);
    const std::string manifest = checkpoint::read_text(list, limit);
    if (checkpoint::hash128(manifest) != index.manifests[rank])
      throw InvalidUsage(list + ": damaged: its hash differs from the one in the index");
    manifests.push_back(checkpoint::parse_manifest(manifest, list));
    if (manifests.back().rank != static_cast<int>(rank))
      throw InvalidUsage(list + ": is that of rank " + std::to_string(manifests.back().rank));
  }
  for (std::size_t rank = 0; rank < manifests.size(); ++rank) {
    const Manifest& manifest = manifests[rank];
    files.push_back(
        std::make_unique<DataFile>(directory + "/" + checkpoint::data_name(static_cast<int>(rank)), manifest));
    for (const TensorSlice& slice : manifest.slices)
      if (slice.what != checkpoint::kPluginState) places[{slice.tensor, slice.what}].push_back({rank, &slice});
  }
  for (auto& [what, found] : places)
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return a.slice->range.begin < b.slice->range.begin; });
  compare_with_index();
}

/// The slices are those of the index's tensors and buffers: each element once, and nothing else.
void Checkpoint::State::compare_with_index() const {
  std::size_t known = 0;
  const auto compare = [&](const std::string& name, int what, std::int64_t count, std::optional<DType> dtype) {
    const std::string kind = what >= 0 ? "the optimizer state of " : what == checkpoint::kBuffer ? "the buffer " : "";
    const auto fail = [&](std::int64_t element, const std::string& problem) {
      throw InvalidUsage(directory + ": element " + std::to_string(element) + " of " + kind + "'" + name + "' " +
                         problem);
    };
    std::int64_t next = 0;
    const auto found = places.find({name, what});
    if (found != places.end()) {
      ++known;
      for (const Place& place : found->second) {
        const ElementRange& range = place.slice->range;
        if (range.count() == 0) continue;
        if (range.begin > next) break;
        if (range.begin < next) fail(range.begin, "is stored twice");
        if (range.end > count) fail(count, "is stored, but the index has only " + std::to_string(count));
        if (dtype && place.slice->dtype != *dtype)
          fail(next,
               "is " + std::string(name_of(place.slice->dtype)) + ", in the index " + std::string(name_of(*dtype)));
        next = range.end;
      }
    }
    if (next < count) fail(next, "is missing");
  };
  for (const CheckpointTensor& tensor : index.tensors)
    for (int what = kValue; what < tensor.states; ++what)
      compare(tensor.name, what, count_of(tensor.shape), std::nullopt);
  for (const CheckpointBuffer& buffer : index.buffers)
    compare(buffer.name, checkpoint::kBuffer, count_of(buffer.shape), buffer.dtype);
  if (known == places.size()) return;
  for (const auto& [key, found] : places)
    if (key.second == checkpoint::kBuffer ? !names(index.buffers, key.first) : !names(index.tensors, key.first))
      throw InvalidUsage(directory + ": rank " + std::to_string(found.front().file) + " stores '" + key.first +
                         "', which the index does not have");
  throw InvalidUsage(directory + ": stores more optimizer states than the index has");
}

Checkpoint::Checkpoint(const std::string& directory) {
  // A run that saves to the directory may concurrently remove or replace the step. Once its files are open they stay
  // readable.
  constexpr int kAttempts = 100;
  for (int attempt = 1;; ++attempt) {
    state_ = std::make_unique<State>();
    state_->directory = resolve(directory);
    const std::string path = state_->directory + "/" + checkpoint::kIndex;
    std::string text;
    try {
      text = checkpoint::read_text(path, checkpoint::kMaxIndexBytes);
      state_->open(text);
      return;
    } catch (const InvalidUsage&) {
      const bool read = !text.empty();
      // the step was not modified
      if (read ? text_or_none(path) == text : fs::exists(fs::symlink_status(path))) throw;
      if (attempt == kAttempts || (!read && directory == state_->directory))
        throw InvalidUsage(state_->directory +
                           ": removed while it was read; a run that saves there removes older steps");
    }
  }
}

Checkpoint::~Checkpoint() = default;
const std::string& Checkpoint::directory() const { return state_->directory; }
std::uint64_t Checkpoint::step() const { return state_->index.step; }
int Checkpoint::ranks() const { return static_cast<int>(state_->manifests.size()); }
const std::string& Checkpoint::strategy() const { return state_->index.strategy; }
bool Checkpoint::finite() const { return state_->index.finite; }
std::optional<bool> Checkpoint::replicas_apart() const { return state_->index.apart; }
const Attributes& Checkpoint::attributes() const { return state_->index.attributes; }
const std::vector<CheckpointTensor>& Checkpoint::tensors() const { return state_->index.tensors; }
const std::vector<CheckpointBuffer>& Checkpoint::buffers() const { return state_->index.buffers; }
std::uint64_t Checkpoint::bytes_read() const { return state_->bytes_read; }

void Checkpoint::State::read(const Place& place, ElementRange range, float* out) {
  const TensorSlice& slice = *place.slice;
  const std::size_t element = size_of(slice.dtype);
  const std::uint64_t begin = slice.offset + static_cast<std::uint64_t>(range.begin - slice.range.begin) * element;
  const std::uint64_t end = begin + static_cast<std::uint64_t>(range.count()) * element;
  const bool half = slice.dtype != DType::f32;
  std::vector<std::byte> raw(half ? static_cast<std::size_t>(end - begin) : 0);
  read_bytes(*files[place.file], begin, end, half ? raw.data() : reinterpret_cast<std::byte*>(out));
  if (half) widen(slice.dtype, raw, out);
}

/// Whole blocks are read to their destination and hashed there; of blocks at the ends, a part is copied.
void Checkpoint::State::read_bytes(const DataFile& file, std::uint64_t begin, std::uint64_t end, std::byte* out) {
  constexpr std::size_t kAtOnce = 16;  // blocks: they are hashed while they are in the cache
  const auto checked = [&](std::size_t first, std::size_t last, std::byte* to) {
    file.read(first, last, to);
    bytes_read += file.bytes_of(first, last);
    for (const std::size_t block : file.damaged(first, last, to)) throw InvalidUsage(file.describe(block));
  };
  while (begin < end) {
    const std::size_t first = begin / kBlock;
    if (begin % kBlock == 0 && end - begin >= kBlock) {
      const std::size_t last = first + std::min<std::size_t>(kAtOnce, (end - begin) / kBlock);
      checked(first, last, out);
      out += (last - first) * kBlock;
      begin = last * kBlock;
      continue;
    }
    edge.resize(kBlock);
    checked(first, first + 1, edge.data());
    const std::uint64_t until = std::min<std::uint64_t>(end, (first + 1) * kBlock);
    out = std::copy(edge.data() + (begin - first * kBlock), edge.data() + (until - first * kBlock), out);
    begin = until;
  }
}

void Checkpoint::read(const std::string& tensor, int what, ElementRange range, float* out) {
  std::int64_t next = range.begin;
  if (next < 0) throw InvalidUsage(directory() + ": '" + tensor + "' has no element " + std::to_string(next));
  const auto found = state_->places.find({tensor, what});
  if (found != state_->places.end()) {
    for (const State::Place& place : found->second) {
      const ElementRange part{std::max(next, place.slice->range.begin), std::min(range.end, place.slice->range.end)};
      if (part.begin != next || part.count() <= 0) continue;
      state_->read(place, part, out + (part.begin - range.begin));
      next = part.end;
    }
  }
  if (next < range.end)
    throw InvalidUsage(directory() + ": element " + std::to_string(next) + " of " +
                       (what == kValue ? "" : "the optimizer state of ") + "'" + tensor + "' is missing");
}

void Checkpoint::read_buffer(const std::string& name, std::span<std::byte> out) {
  if (!names(buffers(), name)) throw InvalidUsage(directory() + ": buffer '" + name + "' is missing");
  const auto found = state_->places.find({name, checkpoint::kBuffer});
  std::size_t bytes = 0;
  if (found != state_->places.end())
    for (const State::Place& place : found->second) bytes += place.slice->bytes();
  if (bytes != out.size())
    throw InvalidUsage(directory() + ": buffer '" + name + "' has " + std::to_string(bytes) + " bytes, not " +
                       std::to_string(out.size()));
  if (found == state_->places.end()) return;
  for (const State::Place& place : found->second) {
    const std::uint64_t begin = place.slice->offset;
    state_->read_bytes(*state_->files[place.file], begin, begin + place.slice->bytes(), out.data());
    out = out.subspan(place.slice->bytes());
  }
}

std::vector<Checkpoint::PluginStateEntry> Checkpoint::plugin_state(int rank) const {
  std::vector<PluginStateEntry> all;
  for (const TensorSlice& slice : state_->manifests.at(static_cast<std::size_t>(rank)).slices)
    if (slice.what == checkpoint::kPluginState)
      all.push_back({slice.tensor, static_cast<std::size_t>(slice.range.count())});
  std::sort(all.begin(), all.end());
  return all;
}

void Checkpoint::read_plugin_state(int rank, const std::string& name, float* out) {
  const auto file = static_cast<std::size_t>(rank);
  for (const TensorSlice& slice : state_->manifests.at(file).slices)
    if (slice.what == checkpoint::kPluginState && slice.tensor == name)
      return state_->read({file, &slice}, slice.range, out);
  throw InvalidUsage(directory() + ": rank " + std::to_string(rank) + " saved no plug-in state '" + name + "'");
}

std::vector<std::string> Checkpoint::verify() {
  constexpr std::size_t kAtOnce = 16;  // blocks
  std::vector<std::string> wrong;
  std::vector<std::byte> blocks(kAtOnce * kBlock);
  for (const auto& file : state_->files) {
    for (std::size_t first = 0; first < file->blocks(); first += kAtOnce) {
      const std::size_t last = std::min(first + kAtOnce, file->blocks());
      file->read(first, last, blocks.data());
      state_->bytes_read += file->bytes_of(first, last);
      for (const std::size_t block : file->damaged(first, last, blocks.data())) wrong.push_back(file->describe(block));
    }
  }
  return wrong;
}

std::string latest_checkpoint(const std::string& directory) {
  const checkpoint::StepList steps = checkpoint::find_steps(directory);
  // The damaged one might be the newest: resuming from another would silently lose steps.
  if (!steps.damaged.empty())
    throw InvalidUsage(steps.damaged.front() + "; name the directory of another step, or remove this one");
  return steps.whole.empty() ? "" : steps.whole.back().path;
}

std::string latest_finite_checkpoint(const std::string& directory) {
  const checkpoint::StepList steps = checkpoint::find_steps(directory);
  const checkpoint::FoundStep* newest = steps.newest_finite();
  return newest == nullptr ? "" : newest->path;
}

}  // namespace tessera::fsdp
