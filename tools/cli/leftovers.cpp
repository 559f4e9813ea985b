#include "tools/cli/leftovers.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>

#include "tessera/comm/bootstrap/rendezvous_file.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFolder = "/dev/shm/";
constexpr std::array<std::string_view, 4> kSegments = {"vader_segment.", "sm_segment.", "mpich_shar_tmp",
                                                       "ucx_shm_posix_"};

bool is_ours(const fs::path& path) {
  struct stat status = {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
}

std::set<std::string> segments() {
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(kFolder)) {
    const std::string name = entry.path().filename();
    for (const std::string_view prefix : kSegments)
      if (name.starts_with(prefix) && is_ours(entry.path())) found.insert(entry.path());
  }
  return found;
}

/// True if the process is gone, or has ended and is not reaped: it uses nothing any more.
bool has_ended(const fs::path& process) {
  std::ifstream file(process / "stat");
  std::string line;
  if (!std::getline(file, line)) return !fs::exists(process);
  const std::size_t state = line.rfind(')') + 2;
  return state < line.size() && line[state] == 'Z';
}

/// Removes from `unused` what this process has open or mapped. Reads descriptors first: a file that is closed in
/// between is mapped by then. False: the process is alive but can't be inspected.
bool remove_used(const fs::path& process, std::set<std::string>& unused) {
  std::error_code error;
  for (auto file = fs::directory_iterator(process / "fd", error); !error && file != fs::directory_iterator();
       file.increment(error)) {
    std::error_code gone;
    unused.erase(fs::read_symlink(file->path(), gone));
  }
  if (error) return has_ended(process);
  std::ifstream maps(process / "maps");
  for (std::string line; std::getline(maps, line);)
    if (const std::size_t at = line.find(kFolder); at != std::string::npos) unused.erase(line.substr(at));
  return maps.eof() || has_ended(process);
}

/// All processes are visible from the initial pid namespace.
bool sees_all_processes() {
  struct stat status = {};
  constexpr ino_t kFirst = 0xEFFFFFFC;  // the kernel's PROC_PID_INIT_INO
  return ::stat("/proc/self/ns/pid", &status) == 0 && status.st_ino == kFirst;
}

void remove_segments() {
  if (!sees_all_processes()) return;
  std::set<std::string> unused = segments();
  if (unused.empty()) return;
  for (const auto& process : fs::directory_iterator("/proc")) {
    if (std::atoi(process.path().filename().c_str()) <= 1) continue;  // init is not a rank and may not be inspectable
    struct stat status = {};
    if (::stat(process.path().c_str(), &status) != 0 || status.st_uid != ::geteuid()) continue;
    if (!remove_used(process.path(), unused)) return;
  }
  for (const std::string& path : unused) ::unlink(path.c_str());
}

}  // namespace

void remove_leftovers() noexcept {
  comm::remove_dead_rendezvous_files();
  try {
    remove_segments();
  } catch (const std::exception&) {  // they remain until the next start
  }
}

}  // namespace tessera::tools
