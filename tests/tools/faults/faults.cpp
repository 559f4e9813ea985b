// Library preloaded into a rank: the N-th call that changes anything below a directory ends the process, or fails as on
// a full disk; all such calls can be logged.
//
//   FAULT_FOLDER   absolute path; FAULT_RANK: the affected rank (TESSERA_RANK); FAULT_AT: N, from 1
//   FAULT_KIND     kill; full: that call and all later ones that need space fail; once: that one alone does;
//                  short: from that call on every write is interrupted or does half of its work;
//                  close: from that call on files of data can't be closed, as on a full network disk
//   FAULT_COUNT    a file to which the number of calls is written when the process exits
//   FAULT_LOG      a file outside the directory to which every rank appends its calls: "RANK CALL PATH [PATH]". Calls
//                  that flush are logged when they are done, all others before.
//
// It is preloaded into every process of a run, also those without the library, so it reads the environment itself.
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

bool in_directory(std::string_view path) {
  const std::string_view directory = variable("FAULT_FOLDER");
  return !directory.empty() && path.substr(0, directory.size()) == directory;
}

std::string path_of(int file) {
  char path[PATH_MAX];
  const ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof(path));
  return {path, static_cast<std::size_t>(length > 0 ? length : 0)};
}

bool below(std::string_view path) { return is_hit_rank() && in_directory(path); }
bool below_file(int file) { return is_hit_rank() && in_directory(path_of(file)); }

enum class Needs { room, nothing };

/// Whether this call or an earlier one is the N-th.
bool has_come() {
  const std::string at(variable("FAULT_AT"));
  return !at.empty() && calls >= std::stol(at);
}

/// True if the call must fail for lack of space.
bool reached(Needs needs) {
  ++calls;
  if (!has_come()) return false;
  const std::string_view kind = variable("FAULT_KIND");
  if (kind == "kill") ::kill(::getpid(), SIGKILL);
  static std::atomic<bool> failed{false};
  if (needs == Needs::nothing || (kind != "full" && (kind != "once" || failed.exchange(true)))) return false;
  errno = ENOSPC;
  return true;
}

/// The function of that name that the preloaded one replaces.
template <class Function>
Function real(const char* name, Function) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

void write_down(std::string_view call, std::string_view path, std::string_view second = {}) {
  const std::string log(variable("FAULT_LOG"));
  if (log.empty() || variable("TESSERA_RANK").empty() || !in_directory(path)) return;
  std::string line(variable("TESSERA_RANK"));
  for (const std::string_view word : {call, path, second})
    if (!word.empty()) line.append(" ").append(word);
  line += '\n';
  const int file = real("open", static_cast<int (*)(const char*, int, ...)>(nullptr))(
      log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  [[maybe_unused]] const ssize_t written = ::write(file, line.data(), line.size());  // one call keeps lines whole
  real("close", &::close)(file);
}

/// A write that does half of its work, and at every third call none.
ssize_t write_some(int file, const void* data, std::size_t bytes, off_t at) {
  static std::atomic<int> writes{0};
  if (++writes % 3 == 0) {
    errno = EINTR;
    return -1;
  }
  return real("pwrite", &::pwrite)(file, data, (bytes + 1) / 2, at);
}

ssize_t write_at(int file, const void* data, std::size_t bytes, off_t at) {
  write_down("write", path_of(file));
  if (below_file(file)) {
    if (reached(Needs::room)) return -1;
    if (has_come() && variable("FAULT_KIND") == "short") return write_some(file, data, bytes, at);
  }
  return real("pwrite", &::pwrite)(file, data, bytes, at);
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
  if ((flags & O_CREAT) != 0) write_down("create", path);
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
ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t at) { return write_at(file, data, bytes, at); }
ssize_t pwrite64(int file, const void* data, std::size_t bytes, off64_t at) { return write_at(file, data, bytes, at); }
int fsync(int file) {
  if (below_file(file) && reached(Needs::room)) return -1;
  const int result = real("fsync", &::fsync)(file);
  if (result == 0) write_down("fsync", path_of(file));
  return result;
}
int close(int file) {
  const bool of_ours = below_file(file);
  if (of_ours) reached(Needs::nothing);
  const bool fails =
      of_ours && has_come() && variable("FAULT_KIND") == "close" && path_of(file).ends_with(".safetensors");
  const int result = real("close", &::close)(file);
  if (!fails) return result;
  errno = ENOSPC;
  return -1;
}
int mkdir(const char* path, mode_t mode) noexcept {
  write_down("mkdir", path);
  if (below(path) && reached(Needs::room)) return -1;
  return real("mkdir", &::mkdir)(path, mode);
}
int rename(const char* from, const char* to) noexcept {
  write_down("rename", from, to);
  if (below(from)) reached(Needs::nothing);
  return real("rename", &::rename)(from, to);
}
int unlink(const char* path) noexcept {
  write_down("remove", path);
  if (below(path)) reached(Needs::nothing);
  return real("unlink", &::unlink)(path);
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  write_down("remove", *path == '/' ? std::string(path) : path_of(directory) + "/" + path);
  if (below(path) || below_file(directory)) reached(Needs::nothing);
  return real("unlinkat", &::unlinkat)(directory, path, flags);
}
int rmdir(const char* path) noexcept {
  write_down("remove", path);
  if (below(path)) reached(Needs::nothing);
  return real("rmdir", &::rmdir)(path);
}
int remove(const char* path) noexcept {
  write_down("remove", path);
  if (below(path)) reached(Needs::nothing);
  return real("remove", &::remove)(path);
}

}  // extern "C"
