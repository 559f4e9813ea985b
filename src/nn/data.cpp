#include "tessera/nn/data.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "tessera/base/checksum.h"
#include "tessera/base/parse.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/random.h"

namespace tessera::nn {
namespace {

std::int64_t bytes_of(TokenFormat format) {
  return format == TokenFormat::u32 ? 4 : format == TokenFormat::u16 ? 2 : 1;
}

template <class T>
void widen(const std::byte* from, std::int64_t count, std::int32_t* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, from + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int32_t>(token);
  }
}

template <class T>
T largest(std::span<const std::byte> bytes) {
  T most = 0;
  for (std::size_t at = 0; at + sizeof(T) <= bytes.size(); at += sizeof(T)) {
    T token;
    std::memcpy(&token, bytes.data() + at, sizeof(T));
    most = std::max(most, token);
  }
  return most;
}

/// (high word of random * count) / 2^64: uniform over [0, count), up to count / 2^64.
std::int64_t below(std::uint64_t random, std::int64_t count) {
  __extension__ using U128 = unsigned __int128;
  return static_cast<std::int64_t>((U128{random} * static_cast<std::uint64_t>(count)) >> 64U);
}

/// Files of other kinds, by their first bytes, and how to make tokens or text of them.
struct Kind {
  std::string_view magic, name, remedy;
  std::size_t at = 0;  ///< where the bytes are
};
constexpr std::string_view kUnpack = "unpack it first";
constexpr std::string_view kConvert = "write its text, or the ids of its tokens, to a file of their own";
constexpr Kind kKinds[] = {
    {"\x93NUMPY", "a NumPy array (.npy)", "write its ids without a header, by array.astype('<u2').tofile(FILE)"},
    {std::string_view("\x1f\x8b\x08", 3), "compressed by gzip", kUnpack},
    {"\x28\xb5\x2f\xfd", "compressed by zstd", kUnpack},
    {std::string_view("\xfd"
                      "7zXZ\0",
                      6),
     "compressed by xz", kUnpack},
    {"BZh", "compressed by bzip2", kUnpack},
    {"\x04\x22\x4d\x18", "compressed by lz4", kUnpack},
    {"7z\xbc\xaf\x27\x1c", "a 7z archive", kUnpack},
    {"Rar!\x1a\x07", "a RAR archive", kUnpack},
    {"ustar", "a tar archive", kUnpack, 257},
    {"PK\x03\x04", "a zip archive, as .npz and PyTorch's .pt are", kUnpack},
    {"PAR1", "a Parquet file", kConvert},
    {"ARROW1", "an Arrow file", kConvert},
    {"\x89HDF\r\n", "an HDF5 file", kConvert},
    {"MMIDIDX", "an index of Megatron-LM", "give the .bin file beside it"},
    {"%PDF-", "a PDF", kConvert},
    {"SQLite format 3", "an SQLite database", kConvert},
    {"\x80\x04\x95", "a pickle", kConvert},
    {"\x80\x05\x95", "a pickle", kConvert},
    {"Obj\x01", "an Avro file", kConvert},
    {"ORC", "an ORC file", kConvert},
    {"GGUF", "a model (GGUF)", kConvert},
};

/// What is looked at to tell the kind of a file.
constexpr std::size_t kLooked = 1U << 20U;

std::string_view without_space(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

/// True at the beginning of `{"key":`, whether or not the object ends within the text.
bool begins_record(std::string_view text) {
  if (!text.starts_with('{')) return false;
  text = without_space(text.substr(1));
  const std::size_t end = text.starts_with('"') ? text.find_first_of("\"\n", 1) : std::string_view::npos;
  return end != std::string_view::npos && text[end] == '"' && without_space(text.substr(end + 1)).starts_with(':');
}

/// JSON Lines (each of the first two lines is an object or an array), or an array of objects. `cut`: the text goes on.
bool is_json(std::string_view text, bool cut) {
  constexpr std::string_view kMark = "\xef\xbb\xbf";
  text = without_space(text.starts_with(kMark) ? text.substr(kMark.size()) : text);
  if (text.starts_with('[') && begins_record(without_space(text.substr(1)))) return true;
  const std::size_t end = text.find('\n');
  const std::string_view first = text.substr(0, end);
  const std::string_view rest = end == std::string_view::npos ? "" : without_space(text.substr(end));
  const std::string_view second = rest.substr(0, rest.find('\n'));
  const auto is_value = [&](std::string_view line, bool last) {
    if (last && cut) return begins_record(line);
    return (line.starts_with('{') || line.starts_with('[')) && nlohmann::json::accept(line);
  };
  if (!is_value(first, first.size() == text.size())) return false;
  return second.empty() ? first.starts_with('{') : is_value(second, second.size() == rest.size());
}

/// The byte order mark of UTF-16 or UTF-32, and a first character of ASCII.
bool is_utf16(std::string_view text) {
  const bool little = text.starts_with("\xff\xfe"), big = text.starts_with("\xfe\xff");
  return text.size() >= 4 && ((little && text[3] == 0) || (big && text[2] == 0));
}

/// True of bytes that text doesn't have, but ids of 16 or 32 bits do.
bool is_control(unsigned char c) { return c == 127 || (c < 32 && c != 27 && (c < 8 || c > 13)); }

/// ASCII, with a few bytes of other characters.
bool is_text(std::string_view bytes) {
  constexpr std::size_t kFewest = 64;
  const auto ascii = std::ranges::count_if(bytes, [](unsigned char c) { return c < 127; });
  return bytes.size() >= kFewest && std::ranges::none_of(bytes, is_control) &&
         static_cast<std::size_t>(ascii) * 4 >= bytes.size() * 3;
}

bool is_binary(std::string_view bytes) {
  constexpr std::size_t kFewest = 256;
  return bytes.size() >= kFewest &&
         static_cast<std::size_t>(std::ranges::count_if(bytes, is_control)) * 64 > bytes.size();
}

/// True if every second number is the high half of an id below 8 * 2^(8 sizeof(T)), and the others are none.
template <class T>
bool is_of_wider_ids(std::string_view bytes) {
  constexpr std::size_t kFewest = 32;
  constexpr T kHigh = 8;
  bool low = false, small = false, zeros = true;  // ids below 8 have high halves of 0 alone
  const std::size_t count = bytes.size() / sizeof(T);
  for (std::size_t i = 0; i < count; ++i) {
    T number;
    std::memcpy(&number, bytes.data() + i * sizeof(T), sizeof(T));
    if (i % 2 == 1 && number >= kHigh) return false;
    low = low || (i % 2 == 0 && number >= kHigh);
    small = small || (i % 2 == 0 && number != 0);
    zeros = zeros && (i % 2 == 0 || number == 0);
  }
  return count >= kFewest && (low || (small && zeros));
}

/// Throws InvalidUsage if the content can't be what `format` says.
void check_kind(const std::string& path, std::string_view content, TokenFormat format) {
  const auto refuse = [&](std::string_view is, std::string_view remedy) {
    throw InvalidUsage(path + ": is " + std::string(is) + ", not " +
                       (format == TokenFormat::bytes ? "text" : "the ids that --data-format names") + "; " +
                       std::string(remedy));
  };
  if (format == TokenFormat::any) return;
  for (const Kind& kind : kKinds)
    if (content.size() > kind.at && content.substr(kind.at).starts_with(kind.magic)) refuse(kind.name, kind.remedy);
  if (is_utf16(content)) refuse("text in UTF-16 or UTF-32", "write it in UTF-8, such as by iconv -f UTF-16 -t UTF-8");
  const bool cut = content.size() > kLooked;
  content = content.substr(0, kLooked);
  if (is_json(content, cut)) refuse("JSON", "write only its text to a file, such as by jq -r .text");
  if (format == TokenFormat::bytes) {
    if (is_binary(content)) refuse("binary", "give --data-format u16 or u32 if it holds ids of tokens");
    return;
  }
  if (is_text(content)) refuse("text", "leave --data-format out, or write the ids that the model's tokenizer gives");
  if (format == TokenFormat::u16 && is_of_wider_ids<std::uint16_t>(content) && !is_of_wider_ids<std::uint32_t>(content))
    refuse("of ids of 32 bits", "give --data-format u32");
  if (format == TokenFormat::u16 ? is_of_wider_ids<std::uint16_t>(content) : is_of_wider_ids<std::uint32_t>(content))
    refuse("of ids of 64 bits", "write them in 32, by array.astype('<u4').tofile(FILE)");
}

using WriteRow = std::function<void(std::int64_t row, std::int32_t* out)>;

/// Creates an i32 [rows, positions] tensor whose rows `write` fills.
Tensor make_ids(Context& context, const Shape& shape, const WriteRow& write) {
  Tensor ids = Tensor::empty(context, shape, DType::i32);
  upload(context, ids.raw(), ids.bytes(), [&](void* out) {
    for (std::int64_t row = 0; row < shape[0]; ++row) write(row, static_cast<std::int32_t*>(out) + row * shape[1]);
  });
  return ids;
}

void require_window(const TokenDataset& files, ElementRange range, std::int64_t positions) {
  if (positions < 1)
    throw InvalidUsage("data: a sequence length of " + std::to_string(positions) + ", needs 1 or more");
  if (range.begin < 0 || range.end > files.size() || range.count() < positions + 1)
    throw InvalidUsage("data: " + files.name() + " has " + std::to_string(range.count()) +
                       " tokens in this range, needs at least " + std::to_string(positions + 1) + " (sequence length " +
                       std::to_string(positions) + " and one to predict)");
}

}  // namespace

TokenFormat parse_token_format(std::string_view name) {
  constexpr std::array<std::string_view, 3> kNames = {"bytes", "u16", "u32"};
  return static_cast<TokenFormat>(base::parse_name(name, "data format", kNames));
}

TokenDataset::TokenDataset(const std::vector<std::string>& paths, TokenFormat format, std::int64_t vocabulary)
    : format_(format) {
  if (paths.empty()) throw InvalidUsage("data: no file was named");
  if (bytes_of(format) == 1 && vocabulary < 256)
    throw InvalidUsage("data: text needs a vocabulary of 256 or more, the model's has " + std::to_string(vocabulary));
  std::int64_t end = 0;
  for (const std::string& path : paths) {
    files_.emplace_back(path);
    const auto bytes = static_cast<std::int64_t>(files_.back().bytes().size());
    if (bytes == 0) throw InvalidUsage(path + ": the file is empty");
    check_kind(path, {reinterpret_cast<const char*>(files_.back().bytes().data()), files_.back().bytes().size()},
               format);
    if (bytes % bytes_of(format) != 0)
      throw InvalidUsage(path + ": " + std::to_string(bytes) + " bytes are not a multiple of " +
                         std::to_string(bytes_of(format)) + ", the size of a token");
    check_ids(files_.size() - 1, vocabulary);
    ends_.push_back(end += bytes / bytes_of(format));
  }
}

void TokenDataset::check_ids(std::size_t file, std::int64_t vocabulary) const {
  if (bytes_of(format_) == 1) return;
  const std::span<const std::byte> bytes = files_[file].bytes();
  const std::int64_t most = format_ == TokenFormat::u16 ? largest<std::uint16_t>(bytes) : largest<std::uint32_t>(bytes);
  if (most >= vocabulary)
    throw InvalidUsage(files_[file].path() + ": token " + std::to_string(most) +
                       " is outside the model's vocabulary of " + std::to_string(vocabulary) +
                       "; check that the ids are of its tokenizer and as --data-format says");
}

std::string TokenDataset::hash() const {
  base::RunningChecksum sum;
  for (const MappedFile& file : files_) sum.add(file.bytes());
  char digits[17] = {};
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum.value()));
  return digits;
}

std::string TokenDataset::name() const {
  if (files_.size() == 1) return files_.front().path();
  return files_.front().path() + " and " + std::to_string(files_.size() - 1) + " more";
}

void TokenDataset::read_file(std::size_t file, std::int64_t begin, std::int64_t count, std::int32_t* out) const {
  const std::byte* from = files_[file].bytes().data() + begin * bytes_of(format_);
  switch (format_) {
    case TokenFormat::bytes:
    case TokenFormat::any:
      return widen<std::uint8_t>(from, count, out);
    case TokenFormat::u16:
      return widen<std::uint16_t>(from, count, out);
    case TokenFormat::u32:
      return widen<std::uint32_t>(from, count, out);
  }
}

void TokenDataset::read(std::int64_t begin, std::int64_t count, std::int32_t* out) const {
  if (begin < 0 || count < 0 || count > size() - begin)
    throw InvalidUsage("data: tokens " + std::to_string(begin) + " to " + std::to_string(begin + count) + " of " +
                       name() + ", which has " + std::to_string(size()));
  while (count > 0) {
    const auto file = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    const std::int64_t start = file == 0 ? 0 : ends_[file - 1];
    const std::int64_t part = std::min(count, ends_[file] - begin);
    read_file(file, begin - start, part, out);
    begin += part;
    out += part;
    count -= part;
  }
}

BatchSampler::BatchSampler(std::shared_ptr<const TokenDataset> files, const BatchOptions& options)
    : files_(std::move(files)), options_(options) {
  if (options.global_batch < 1)
    throw InvalidUsage("data: a global batch of " + std::to_string(options.global_batch) + ", needs 1 or more");
  require_window(*files_, options_.range, options_.positions);
}

std::int64_t BatchSampler::window(std::int64_t step, std::int64_t index) const {
  if (step < 1 || index < 0 || index >= options_.global_batch)
    throw InvalidUsage("data: sequence " + std::to_string(index) + " of step " + std::to_string(step) +
                       "; steps count from 1, and " + std::to_string(options_.global_batch) + " sequences are in one");
  const auto sample = static_cast<std::uint64_t>(step - 1) * static_cast<std::uint64_t>(options_.global_batch) +
                      static_cast<std::uint64_t>(index);
  std::uint32_t words[2];
  random_words(tensor_stream(options_.seed, "batch order"), 2 * sample, 2 * sample + 2, words);
  const std::uint64_t random = (std::uint64_t{words[1]} << 32U) | words[0];
  return options_.range.begin + below(random, options_.range.count() - options_.positions);
}

TokenBatch BatchSampler::batch(Context& context, std::int64_t step, ElementRange indices) const {
  const Shape shape{indices.count(), options_.positions};
  const auto ids = [&](std::int64_t later) {
    return make_ids(context, shape, [&](std::int64_t row, std::int32_t* out) {
      files_->read(window(step, indices.begin + row) + later, options_.positions, out);
    });
  };
  return {ids(0), ids(1)};
}

SequentialSampler::SequentialSampler(std::shared_ptr<const TokenDataset> files, ElementRange range,
                                     std::int64_t positions)
    : files_(std::move(files)), range_(range), positions_(positions) {
  require_window(*files_, range_, positions_);
}

TokenBatch SequentialSampler::batch(Context& context, ElementRange windows) const {
  const auto ids = [&](std::int64_t later, std::int32_t beyond) {
    return make_ids(context, {windows.count(), positions_}, [&, later, beyond](std::int64_t row, std::int32_t* out) {
      const std::int64_t window = windows.begin + row;
      if (window < count()) return files_->read(range_.begin + window * positions_ + later, positions_, out);
      std::fill_n(out, positions_, beyond);
    });
  };
  return {ids(0, 0), ids(1, kernels::kIgnoreIndex)};
}

}  // namespace tessera::nn
