#include "tools/cli/corpus.h"

#include <filesystem>
#include <system_error>

#include "tessera/base/error.h"

namespace tessera::tools {

std::string default_corpus() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  const fs::path built = (program.parent_path() / ".." / "corpus" / "gcide.txt").lexically_normal();
  const fs::path installed = "/usr/share/tessera/corpus/gcide.txt";
  for (const fs::path& path : {built, installed})
    if (fs::is_regular_file(path, error)) return path.string();
  throw base::InvalidUsage("no text to train on: neither '" + built.string() + "' nor '" + installed.string() +
                           "' is there; run scripts/setup, or give --data FILE");
}

}  // namespace tessera::tools
