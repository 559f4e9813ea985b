#pragma once

#include <chrono>
#include <string>

namespace tessera::fsdp::checkpoint {

/// Holds a folder of checkpoints for one run: an exclusive flock(2) of the file `.lock` in it, which says who has it.
/// The system takes it back when the process ends, however that comes. Where the file system has no locks it holds
/// nothing.
class DirectoryLock {
 public:
  /// Makes the folder if need be. Throws InvalidUsage where somebody else has it and keeps it for so long (who was
  /// killed may take a moment to be gone), SystemError where it can't be opened.
  DirectoryLock(const std::string& folder, std::chrono::milliseconds patience);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace tessera::fsdp::checkpoint
