// Writes to one of our own streams without ever waiting for its reader: what it doesn't take yet is kept.
#pragma once

#include <string>
#include <string_view>

namespace tessera::tools {

class Outlet {
 public:
  explicit Outlet(int stream) : stream_(stream) {}
  /// Appends, and writes what the stream takes now.
  void write(std::string_view text);
  /// To be polled for POLLOUT; -1: nothing is left to write.
  int waiting() const { return empty() ? -1 : stream_; }
  /// Writes what the stream takes now.
  void flush();
  bool empty() const { return kept_.size() == written_; }
  /// So much is kept that no more should be asked for.
  bool full() const { return kept_.size() - written_ > kMost; }
  /// errno of the write that failed, after which nothing is written any more; 0: none.
  int error() const { return error_; }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 20;
  const int stream_;
  std::string kept_;
  std::size_t written_ = 0;  ///< of `kept_`
  int error_ = 0;
};

}  // namespace tessera::tools
