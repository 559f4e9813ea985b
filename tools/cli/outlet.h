// Writes to a standard stream without waiting for its reader: unwritten output is kept.
#pragma once

#include <string>
#include <string_view>

namespace tessera::tools {

class Outlet {
 public:
  explicit Outlet(int stream) : stream_(stream) {}
  /// Appends, and writes what the stream accepts now.
  void write(std::string_view text);
  /// Descriptor to poll for POLLOUT; -1: nothing is left to write.
  int waiting() const { return empty() ? -1 : stream_; }
  /// Writes what the stream accepts now.
  void flush();
  bool empty() const { return kept_.size() == written_; }
  /// True if so much is kept that no more should be appended.
  bool full() const { return kept_.size() - written_ > kMaxPending; }
  /// errno of a failed write, after which nothing more is written; 0: none.
  int error() const { return error_; }

 private:
  static constexpr std::size_t kMaxPending = std::size_t{1} << 20;
  const int stream_;
  std::string kept_;
  std::size_t written_ = 0;  ///< of `kept_`
  int error_ = 0;
};

}  // namespace tessera::tools
