#include "tessera/comm/bootstrap/host_id.h"

#include <sys/stat.h>

#include <fstream>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  if (!std::getline(file, id) || id.empty())
    throw SystemError("init: can't read /proc/sys/kernel/random/boot_id; set TESSERA_HOST_ID to the host's name");
  return id;
}

std::string with_namespace(const char* kind) {
  struct stat status = {};
  const std::string path = std::string("/proc/self/ns/") + kind;
  const bool known = ::stat(path.c_str(), &status) == 0;
  return boot_id() + "/" + kind + ":" + (known ? std::to_string(status.st_ino) : "unknown");
}

}  // namespace

std::string host_identity() { return with_namespace("net"); }
std::string process_space() { return with_namespace("pid"); }

}  // namespace tessera::comm
