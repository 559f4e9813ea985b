#include "tools/cli/line_file.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::tools {

LineFile::LineFile(std::string option, const std::string& path, Mode mode) : option_(std::move(option)) {
  if (path.empty()) return;
  file_.open(path, mode == Mode::append ? std::ios::app : std::ios::trunc);
  if (!file_) throw base::InvalidUsage(option_ + ": can't write '" + path + "'");
}

void LineFile::write(std::string_view text) {
  if (!file_.is_open()) return;
  file_ << text << std::flush;
  if (!file_) throw base::SystemError(option_ + ": writing failed; is the disk full?");
}

}  // namespace tessera::tools
