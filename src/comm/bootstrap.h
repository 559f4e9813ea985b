// What ranks can do with each other before a communicator exists: find each other, and exchange small things.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/base.h"

namespace tessera::comm {

/// Owns a file descriptor.
class TESSERA_API UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept;
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { reset(); }
  void reset() noexcept;
  int release() noexcept;
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Connects the ranks of a world while it is set up. The exchanges are collective and wait, at longest until the
/// deadline given to whoever made the bootstrap; they throw Timeout (naming the ranks that are missing), PeerLost and
/// SystemError.
class TESSERA_API Bootstrap {
 public:
  virtual ~Bootstrap();
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// Ranks are threads of this process: shared objects travel as pointers.
  virtual bool in_process() const noexcept = 0;

  /// What every rank gave, in rank order.
  virtual std::vector<std::string> exchange(std::string_view blob) = 0;
  /// In-process only: the object of every rank, in rank order.
  virtual std::vector<std::shared_ptr<void>> exchange_objects(std::shared_ptr<void> object);
  /// Processes only: a duplicate of every rank's descriptor, in rank order.
  virtual std::vector<UniqueFd> exchange_descriptors(int fd);

  /// After the exchanges: watches the other ranks from a thread of its own and calls `lost` (from there) once for each
  /// that dies, until the bootstrap is destroyed. Ranks that are threads don't die alone: does nothing.
  virtual void watch(std::function<void(int rank)> lost) = 0;
};

}  // namespace tessera::comm
