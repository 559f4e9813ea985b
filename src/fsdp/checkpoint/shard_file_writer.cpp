#include "tessera/fsdp/checkpoint/shard_file_writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <thread>
#include <utility>

#include "tessera/base/atomic_file.h"
#include "tessera/base/thread.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp::checkpoint {
namespace {

std::string this_one() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return "process " + std::to_string(::getpid()) + " on " + host.data();
}

/// The holder's text; empty if it cannot be read (yet).
std::string holder(int file) {
  std::array<char, 512> text{};
  const ssize_t bytes = ::pread(file, text.data(), text.size(), 0);
  return bytes > 0 ? " (" + std::string(text.data(), static_cast<std::size_t>(bytes)) + ")" : "";
}

/// False: another process holds, or may hold, the lock. True also if the file system has no locks.
bool try_lock(int file) { return ::flock(file, LOCK_EX | LOCK_NB) == 0 || (errno != EWOULDBLOCK && errno != EINTR); }

}  // namespace

ShardFileWriter::ShardFileWriter(const std::string& directory, int rank, std::vector<TensorSlice> slices,
                                 std::size_t buffer_bytes)
    : directory_(directory), most_chunks_(std::max<std::size_t>(1, buffer_bytes / kChunk)), header_(lay_out(slices)) {
  manifest_.rank = rank;
  manifest_.slices = std::move(slices);
  const std::string path = directory + "/" + data_name(rank);
  base::OpenedFile file = base::open_regular(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  if (!file.fd) throw SystemError("open of " + path + ": " + file.problem);
  file_ = std::move(file.fd);
  thread_ = base::start_thread([this] { run(); });
}

ShardFileWriter::~ShardFileWriter() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ShardFileWriter::append(const std::byte* data, std::size_t bytes) {
  Chunk chunk;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return state_ == State::failed || !free_.empty() || chunks_ < most_chunks_; });
    if (state_ == State::failed) return;
    if (free_.empty()) {
      ++chunks_;
    } else {
      chunk.copy = std::move(free_.back());
      free_.pop_back();
    }
  }
  chunk.copy.reserve(kChunk);
  chunk.copy.assign(data, data + bytes);
  chunk.bytes = chunk.copy;
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(chunk));
  changed_.notify_all();
}

void ShardFileWriter::append_lasting(std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back({.copy = {}, .bytes = bytes});
  changed_.notify_all();
}

void ShardFileWriter::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

ShardFileWriter::State ShardFileWriter::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

void ShardFileWriter::await() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return state_ != State::writing; });
}

std::string ShardFileWriter::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void ShardFileWriter::run() noexcept {
  State state = State::done;
  std::string failure;
  try {
    write_all();
  } catch (const std::exception& error) {
    state = State::failed;
    failure = error.what();
  }
  const std::lock_guard lock(mutex_);
  state_ = state;
  failure_ = std::move(failure);
  waiting_.clear();
  free_.clear();
  changed_.notify_all();
}

void ShardFileWriter::write_all() {
  const auto* header = reinterpret_cast<const std::byte*>(header_.data());
  write(header, header_.size());
  Chunk chunk;
  while (next(chunk)) {
    check_finite(chunk.bytes);
    write(chunk.bytes.data(), chunk.bytes.size());
  }
  if (!begun_.empty()) manifest_.blocks.push_back(hash64(begun_.data(), begun_.size()));
  const std::string path = directory_ + "/" + data_name(manifest_.rank);
  if (::fsync(file_.get()) != 0) throw system_error("fsync of " + path);
  // Some file systems report a full disk only here.
  if (::close(file_.release()) != 0) throw system_error("close of " + path);
  write_manifest();
}

/// Recycles the chunk that was written, and fetches the next. False at the end.
bool ShardFileWriter::next(Chunk& chunk) {
  std::unique_lock lock(mutex_);
  if (chunk.copy.capacity() > 0) free_.push_back(std::move(chunk.copy));
  changed_.notify_all();
  changed_.wait(lock, [&] { return cancelled_ || ended_ || !waiting_.empty(); });
  if (cancelled_) throw SystemError("the save was canceled");
  if (waiting_.empty()) return false;
  chunk = std::move(waiting_.front());
  waiting_.pop_front();
  return true;
}

void ShardFileWriter::write(const std::byte* data, std::size_t bytes) {
  hash(data, bytes);
  while (bytes > 0) {
    const ssize_t done = ::pwrite(file_.get(), data, bytes, static_cast<off_t>(manifest_.file_bytes));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw system_error("write of " + directory_ + "/" + data_name(manifest_.rank));
    data += done;
    bytes -= static_cast<std::size_t>(done);
    manifest_.file_bytes += static_cast<std::uint64_t>(done);
  }
}

/// Checks the next bytes of the file; a chunk has bytes of one slice only.
void ShardFileWriter::check_finite(std::span<const std::byte> bytes) {
  const auto& slices = manifest_.slices;
  while (slice_ < slices.size() && manifest_.file_bytes >= slices[slice_].offset + slices[slice_].bytes()) ++slice_;
  if (slice_ == slices.size()) return;
  const TensorSlice& slice = slices[slice_];
  if (slice.what < Checkpoint::kValue) return;  // a buffer may hold a mask of infinities
  finite_ = finite_ && base::all_finite(slice.dtype, bytes);
}

void ShardFileWriter::hash(const std::byte* data, std::size_t bytes) {
  while (bytes > 0) {
    if (begun_.empty() && bytes >= kBlock) {  // a whole block is hashed in place
      manifest_.blocks.push_back(hash64(data, kBlock));
      data += kBlock;
      bytes -= kBlock;
      continue;
    }
    const std::size_t more = std::min(bytes, kBlock - begun_.size());
    begun_.insert(begun_.end(), data, data + more);
    data += more;
    bytes -= more;
    if (begun_.size() < kBlock) continue;
    manifest_.blocks.push_back(hash64(begun_.data(), kBlock));
    begun_.clear();
  }
}

void ShardFileWriter::write_manifest() {
  const std::string text = to_text(manifest_);
  write_file_atomically(directory_ + "/" + manifest_name(manifest_.rank), text);
  manifest_hash_ = hash128(text);
}

void flush_directory(const std::string& directory) {
  const int file = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) throw system_error("open of " + directory);
  const int done = ::fsync(file);
  const int why = errno;
  ::close(file);
  errno = why;
  // EINVAL: the file system cannot sync a directory
  if (done != 0 && why != EINVAL) throw system_error("fsync of " + directory);
}

DirectoryLock::DirectoryLock(const std::string& directory, std::chrono::milliseconds patience) {
  std::filesystem::create_directories(directory);
  const std::string path = directory + "/.lock";
  // A user with write access to the directory could have placed a link to one of this user's files there, or a FIFO.
  base::OpenedFile file = base::open_regular(path, O_RDWR | O_CREAT | O_NOFOLLOW);
  if (!file.fd && (file.code == 0 || file.code == ELOOP))
    throw InvalidUsage(path + " is not a regular file, so this run can't lock the directory; remove it");
  if (!file.fd) throw system_error("open of " + path, file.code);
  file_ = std::move(file.fd);
  constexpr std::chrono::milliseconds kPause{50};
  bool mine = try_lock(file_.get());
  for (auto waited = kPause; !mine && waited <= patience; waited += kPause) {
    std::this_thread::sleep_for(kPause);
    mine = try_lock(file_.get());
  }
  if (!mine) {
    const std::string owner = holder(file_.get());
    throw InvalidUsage(directory + ": another run" + owner + " saves to this directory; use a different one");
  }
  // The text is informational: failing to write it is no error.
  const std::string text = this_one();
  if (::ftruncate(file_.get(), 0) == 0) static_cast<void>(::pwrite(file_.get(), text.data(), text.size(), 0) == 0);
}

}  // namespace tessera::fsdp::checkpoint
