#include "tessera/comm/bootstrap/rendezvous_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <locale>
#include <span>
#include <sstream>

#include "tessera/base/checksum.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "tessera-job-1";

/// Field 22 of /proc/PID/stat: with the pid it identifies a process permanently. Empty: no such process, or a zombie.
std::string start_time(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  if (!std::getline(file, line)) return {};
  std::istringstream words(line.substr(std::min(line.size(), line.rfind(')') + 2)));
  std::array<std::string, 20> fields;  // from the third field on
  for (std::string& field : fields) words >> field;
  const std::string& state = fields[0];
  const std::string& threads = fields[17];
  const bool ended = state == "X" || (state == "Z" && threads <= "1");  // the first thread may end before the others
  return ended ? std::string() : fields[19];
}

struct Content {
  RendezvousAddress address;
  std::string pid;
  std::string start;
  std::string space;  ///< the pid namespace of that pid
};

std::optional<Content> read_content(const std::string& path) {
  const OpenedFile file = open_regular(path, O_NOFOLLOW);
  // EACCES: under such a umask, another rank has made the directory and is about to give it its mode.
  if (!file.fd && (file.code == ENOENT || file.code == EACCES)) return std::nullopt;
  if (!file.fd && file.code != 0 && file.code != ELOOP) throw system_error("init: can't read " + path, file.code);
  struct stat status = {};
  if (!file.fd || ::fstat(file.fd.get(), &status) != 0 || status.st_uid != ::geteuid() || (status.st_mode & 077) != 0)
    throw SystemError("init: " + path + " is not private to this user; remove it, or set another TESSERA_RUN_ID");
  std::array<char, 1024> text{};
  const ssize_t length = ::read(file.fd.get(), text.data(), text.size());
  std::istringstream fields(std::string(text.data(), length < 0 ? 0 : static_cast<std::size_t>(length)));
  std::string magic;
  std::string token;
  Content content;
  fields >> magic >> content.address.socket >> token >> content.pid >> content.start;
  if (!fields || magic != kMagic)
    throw SystemError("init: " + path + " is not a rendezvous file of this version; remove it");
  content.address.token = from_hex(token);
  fields >> content.space;
  return content;
}

/// The complete content appears atomically, and only if no file exists: it is written to another file, then linked.
bool create_file(const std::string& path, const std::string& text) {
  const NewFile aside = create_beside(path, ".", O_WRONLY, 0600);
  if (aside.code == ENOENT) return false;  // another run has just removed the empty directory
  if (!aside.fd) throw system_error("init: can't create " + aside.path, aside.code);
  ::fchmod(aside.fd.get(), 0600);  // whatever the umask
  const bool written = ::write(aside.fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const bool linked = written && ::link(aside.path.c_str(), path.c_str()) == 0;
  const int code = errno;
  ::unlink(aside.path.c_str());
  if (!written || (!linked && code != EEXIST)) throw system_error("init: can't write " + path, code);
  return linked;
}

/// Where private directories lie: the second is for containers whose /tmp can't be written.
constexpr std::array<const char*, 2> kParents = {"/tmp", "/dev/shm"};

std::string usual_directory(const std::string& parent) { return parent + "/tessera-" + std::to_string(::geteuid()); }

bool is_private_directory(const struct stat& status) {
  return S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & 077) == 0;
}

bool is_private_directory(const std::string& path) {
  struct stat status = {};
  return ::lstat(path.c_str(), &status) == 0 && is_private_directory(status);
}

/// The usual one first.
std::vector<std::string> private_directories(const std::string& parent) {
  const std::string usual = usual_directory(parent);
  std::vector<std::string> others;
  std::error_code error;
  for (auto entry = fs::directory_iterator(parent, error); !error && entry != fs::directory_iterator();
       entry.increment(error))
    if (const std::string path = entry->path(); path.starts_with(usual + "-") && is_private_directory(path))
      others.push_back(path);
  std::sort(others.begin(), others.end());
  if (is_private_directory(usual)) others.insert(others.begin(), usual);
  return others;
}

std::vector<std::string> private_directories() {
  std::vector<std::string> all;
  for (const char* parent : kParents)
    for (std::string& path : private_directories(parent)) all.push_back(std::move(path));
  return all;
}

/// Empty, with errno, if none can be made in this parent.
std::string private_directory_in(const std::string& parent) {
  const std::string usual = usual_directory(parent);
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (::mkdir(usual.c_str(), 0700) == 0) {
      ::chmod(usual.c_str(), 0700);  // a umask may have taken rights from the owner, too
      return usual;                  // if another run has removed it by now, the caller makes it again
    }
    if (errno != EEXIST) return {};
    struct stat status = {};
    if (::lstat(usual.c_str(), &status) != 0) continue;  // another run has just removed it
    if (!is_private_directory(status)) break;            // another user's, or a file
    ::chmod(usual.c_str(), 0700);                        // its maker may be about to do so
    if (::access(usual.c_str(), W_OK | X_OK) == 0) return usual;
    if (errno == EROFS) return {};
  }
  if (const std::vector<std::string> others = private_directories(parent); !others.empty()) return others.front();
  std::string fresh = usual + "-XXXXXX";
  if (::mkdtemp(fresh.data()) == nullptr) return {};
  ::chmod(fresh.c_str(), 0700);
  return fresh;
}

/// "/job-HASH"
std::string name_of(const std::string& job) {
  std::ostringstream name;
  name.imbue(std::locale::classic());  // the program's may group digits
  name << "/job-" << std::hex << base::checksum(std::as_bytes(std::span(job)));
  return name.str();
}

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

std::string private_directory() {
  int code = 0;
  for (const char* parent : kParents) {
    if (std::string path = private_directory_in(parent); !path.empty()) return path;
    if (code == 0) code = errno;
  }
  throw system_error(
      "init: can't create a directory in /tmp or /dev/shm; make one of them writable, or set "
      "TESSERA_MASTER=host:port and TESSERA_TOKEN",
      code);
}

void remove_private_directory(const std::string& path) noexcept { ::rmdir(path.c_str()); }

std::string usual_rendezvous_file(const std::string& job) { return usual_directory(kParents[0]) + name_of(job); }

std::optional<RendezvousAddress> read_rendezvous_file(const std::string& job) {
  for (const std::string& directory : private_directories())
    if (const std::optional<Content> content = read_content(directory + name_of(job))) return content->address;
  return std::nullopt;
}

RendezvousFile::RendezvousFile(const std::string& job, const RendezvousAddress& address) {
  const std::string pid = std::to_string(::getpid());
  std::ostringstream text;
  text << kMagic << ' ' << address.socket << ' ' << to_hex(address.token) << ' ' << pid << ' ' << start_time(pid) << ' '
       << process_space() << '\n';
  for (int attempt = 0; attempt < 10; ++attempt) {
    directory_ = private_directory();
    path_ = directory_ + name_of(job);
    if (create_file(path_, text.str())) return;
    const std::optional<Content> other = read_content(path_);
    if (other && !other->start.empty() && start_time(other->pid) == other->start)
      throw InvalidUsage("init: process " + other->pid + " is starting a run with the same name '" + job +
                         "'; give each run its own TESSERA_RUN_ID");
    if (other) ::unlink(path_.c_str());  // left by a process that died
  }
  throw SystemError("init: can't create " + path_ + ": other processes keep creating it");
}

void remove_dead_rendezvous_files() noexcept {
  try {
    for (const std::string& directory : private_directories()) {
      for (const auto& entry : fs::directory_iterator(directory)) {
        try {
          const std::optional<Content> content = read_content(entry.path());
          if (content && content->space == process_space() && start_time(content->pid) != content->start)
            ::unlink(entry.path().c_str());
        } catch (const Error&) {  // of another version, or not such a file
        }
      }
      remove_private_directory(directory);
    }
  } catch (const std::exception&) {  // they stay until the next start
  }
}

RendezvousFile::~RendezvousFile() {
  ::unlink(path_.c_str());
  remove_private_directory(directory_);
}

std::string host_identity() { return with_namespace("net"); }
std::string process_space() { return with_namespace("pid"); }

}  // namespace tessera::comm
