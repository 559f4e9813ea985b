// An output file that grows by whole lines while the work goes on, so that other programs can follow it.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

namespace tessera::tools {

class LineFile {
 public:
  /// Whether the lines that an existing file has remain.
  enum class Mode : std::uint8_t { replace, append };

  /// `option`: named in errors. A `path` of "" is no file: write() then does nothing. Throws InvalidUsage.
  LineFile(std::string option, const std::string& path, Mode mode = Mode::replace);
  /// Writes a text that ends with a newline, at once. Throws SystemError.
  void write(std::string_view text);

 private:
  const std::string option_;
  std::ofstream file_;
};

}  // namespace tessera::tools
