#include "tools/cli/machine.h"

#include <sys/sysinfo.h>
#include <sys/utsname.h>

#include <fstream>

#include "tools/cli/output.h"
#include "tools/launch/process.h"

namespace tessera::tools {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name"))
      if (const std::size_t colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown processor";
}

}  // namespace

std::string machine_line() {
  const std::size_t cores = allowed_cores().size();
  std::string text = processor() + ", " + std::to_string(cores) + (cores == 1 ? " core" : " cores");
  struct sysinfo memory {};
  if (::sysinfo(&memory) == 0) text += ", " + human_bytes(static_cast<double>(memory.totalram) * memory.mem_unit);
  utsname system{};
  if (::uname(&system) == 0) text += std::string(", ") + system.sysname + " " + system.release + " " + system.machine;
  return text;
}

}  // namespace tessera::tools
