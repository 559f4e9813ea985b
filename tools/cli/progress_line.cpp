#include "tools/cli/progress_line.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "tessera/base/text.h"

namespace tessera::tools {
namespace {

constexpr std::string_view kEraseLine = "\r\033[K";

/// 0: not known.
std::size_t columns_of_terminal() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

}  // namespace

ProgressLine::ProgressLine(std::string prefix) : on_(::isatty(STDERR_FILENO) != 0), prefix_(std::move(prefix)) {}

void ProgressLine::show(std::string_view text) {
  if (!on_) return;
  std::string line = base::printable(prefix_ + std::string(text));
  // A line that wraps can't be erased. The last column stays free: some terminals wrap after it.
  if (const std::size_t columns = columns_of_terminal(); columns > 0 && line.size() >= columns)
    line.resize(columns - 1);
  // The cursor goes back, so that a line which another part of the program prints overwrites this one.
  fmt::print(stderr, "{}{}\r", kEraseLine, line);
  shown_ = true;
}

void ProgressLine::hide() {
  if (std::exchange(shown_, false)) fmt::print(stderr, "{}", kEraseLine);
}

}  // namespace tessera::tools
