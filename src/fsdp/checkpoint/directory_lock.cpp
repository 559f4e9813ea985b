#include "tessera/fsdp/checkpoint/directory_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <thread>

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
