// Preloaded into a rank: the N-th call that changes anything below a folder ends the process, or fails as on a full
// disk.
//
//   FAULT_FOLDER   absolute; FAULT_RANK: the rank that is hit (TESSERA_RANK); FAULT_AT: N, from 1
//   FAULT_KIND     kill, or full (that call and all later ones that need room fail)
//   FAULT_COUNT    a file that the number of calls is written to when the process exits
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace {

std::atomic<long> calls{0};

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

bool is_hit_rank() { return !variable("FAULT_RANK").empty() && variable("FAULT_RANK") == variable("TESSERA_RANK"); }

bool below(std::string_view path) {
  const std::string_view folder = variable("FAULT_FOLDER");
  return !folder.empty() && is_hit_rank() && path.substr(0, folder.size()) == folder;
}

bool below_file(int file) {
  char path[PATH_MAX];
  const ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof(path));
  return length > 0 && below({path, static_cast<std::size_t>(length)});
}

enum class Needs { room, nothing };

/// True where the call must fail for want of room.
bool reached(Needs needs) {
  const long now = ++calls;
  const std::string at(variable("FAULT_AT"));
  if (at.empty() || now < std::stol(at)) return false;
  if (variable("FAULT_KIND") == "kill") ::kill(::getpid(), SIGKILL);
  if (needs == Needs::nothing) return false;
  errno = ENOSPC;
  return true;
}

/// The function of that name that would have been called.
template <class Function>
Function real(const char* name, Function) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

struct Teller {
  ~Teller() {
    const std::string path(variable("FAULT_COUNT"));
    if (path.empty() || !is_hit_rank()) return;
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) return;
    std::fprintf(file, "%ld\n", calls.load());
    std::fclose(file);
  }
} teller;

using Open = int (*)(const char*, int, ...);
int open_as(const char* name, const char* path, int flags, mode_t mode) {
  if ((flags & (O_CREAT | O_TRUNC)) != 0 && below(path) && reached(Needs::room)) return -1;
  return real(name, Open{})(path, flags, mode);
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  return open_as("open", path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  return open_as("open64", path, flags, mode);
}
ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t at) {
  if (below_file(file) && reached(Needs::room)) return -1;
  return real("pwrite", &::pwrite)(file, data, bytes, at);
}
ssize_t pwrite64(int file, const void* data, std::size_t bytes, off64_t at) {
  if (below_file(file) && reached(Needs::room)) return -1;
  return real("pwrite64", &::pwrite64)(file, data, bytes, at);
}
int fsync(int file) {
  if (below_file(file) && reached(Needs::room)) return -1;
  return real("fsync", &::fsync)(file);
}
int close(int file) {
  if (below_file(file)) reached(Needs::nothing);
  return real("close", &::close)(file);
}
int mkdir(const char* path, mode_t mode) noexcept {
  if (below(path) && reached(Needs::room)) return -1;
  return real("mkdir", &::mkdir)(path, mode);
}
int rename(const char* from, const char* to) noexcept {
  if (below(from)) reached(Needs::nothing);
  return real("rename", &::rename)(from, to);
}
int unlink(const char* path) noexcept {
  if (below(path)) reached(Needs::nothing);
  return real("unlink", &::unlink)(path);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  if (below(path) || below_file(folder)) reached(Needs::nothing);
  return real("unlinkat", &::unlinkat)(folder, path, flags);
}
int rmdir(const char* path) noexcept {
  if (below(path)) reached(Needs::nothing);
  return real("rmdir", &::rmdir)(path);
}
int remove(const char* path) noexcept {
  if (below(path)) reached(Needs::nothing);
  return real("remove", &::remove)(path);
}

}  // extern "C"
