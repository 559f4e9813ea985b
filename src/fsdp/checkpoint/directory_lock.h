#pragma once

#include <chrono>
#include <string>

#include "tessera/base/file.h"

namespace tessera::fsdp::checkpoint {

/// Locks a checkpoint directory for one run: an exclusive flock(2) of the file `.lock` in it, whose text names the
/// holder. The kernel releases the lock when the process ends, for whatever reason. On a file system without locks it
/// has no effect.
class DirectoryLock {
 public:
  /// Creates the directory if it does not exist. Waits up to `patience` for the lock, because a killed process may take
  /// a moment to exit. Throws InvalidUsage if another run still holds the lock, SystemError if the file cannot be
  /// opened.
  DirectoryLock(const std::string& directory, std::chrono::milliseconds patience);

 private:
  base::UniqueFd file_;
};

}  // namespace tessera::fsdp::checkpoint
