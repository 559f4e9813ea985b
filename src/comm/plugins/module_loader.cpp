#include "tessera/comm/plugins/module_loader.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include "tessera/base/device/module_loader.h"
#include "tessera/base/error.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/env_variables.h"
#include "tessera/comm/plugin.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

ModuleFile module_file(const fs::path& path) {
  const std::string stem = path.stem().string();
  return {stem.substr(0, stem.find('-')), path.string(), ""};
}

/// Finds all modules of a directory, or the one at `place`.
void look_in(const fs::path& place, bool required, std::vector<ModuleFile>& found) {
  std::error_code error;
  if (!fs::is_directory(place, error)) {
    if (place.extension() == ".so" && fs::exists(place, error)) {
      found.push_back(module_file(place));
    } else if (required) {
      const bool exists = fs::exists(place, error);
      found.push_back({place.string(), place.string(),
                       std::string(exists ? "neither a directory nor a .so file" : "no such file or directory") +
                           " (TESSERA_PLUGIN_PATH)"});
    }
    return;
  }
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(place, error), end; !error && entry != end; entry.increment(error))
    if (entry->path().extension() == ".so") files.push_back(entry->path());
  if (error) found.push_back({place.string(), place.string(), error.message()});
  std::ranges::sort(files);
  for (const fs::path& file : files) found.push_back(module_file(file));
}

Backend backend_of(const tessera_plugin& plugin) {
  return {.name = plugin.name,
          .devices = plugin.devices,
          .probe = plugin.probe,
          .create =
              [create = plugin.create](std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
                PluginCommunicator made = create(std::move(bootstrap), options);
                if (made.error != nullptr) std::rethrow_exception(made.error);
                return std::move(made.communicator);
              },
          .variables = plugin.variables,
          .deterministic = plugin.deterministic,
          .launch_prefix = plugin.launch_prefix};
}

}  // namespace

std::vector<ModuleFile> find_modules() {
  std::vector<ModuleFile> found;
  const std::string path = env_or_default(env::kPluginPath);
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) look_in(path.substr(begin, end - begin), true, found);
    begin = end + 1;
  }
  look_in(base::module_directory(), false, found);
  return found;
}

const Backend* load_module(const ModuleFile& file) {
  // Loaded modules belong to the process, as for dlopen() itself.
  static std::mutex mutex;
  static std::map<std::string, Backend> loaded;
  if (!file.problem.empty()) throw InvalidUsage(file.problem);
  const std::lock_guard lock(mutex);
  const auto known = loaded.find(file.path);
  if (known != loaded.end()) return &known->second;
  const auto* const plugin = base::open_module<tessera_plugin>(
      file.path, {"tessera_plugin", "backend module", TESSERA_PLUGIN_ABI, sizeof(tessera_plugin)});
  if (plugin->name != file.backend)
    throw InvalidUsage(file.path + ": its backend is called '" + std::string(plugin->name) + "'; rename the file to " +
                       std::string(plugin->name) + ".so");
  return &loaded.emplace(file.path, backend_of(*plugin)).first->second;
}

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{20};

/// One process (the program module-probe beside the modules) that describes one module: loading one may load a vendor's
/// library, which may install signal handlers, start threads, print, or crash.
class ModuleProbe {
 public:
  ModuleProbe(const std::string& program, const std::string& module);
  ModuleProbe(ModuleProbe&& other) noexcept : pid_(std::exchange(other.pid_, -1)), out_(std::move(other.out_)) {}
  ModuleProbe& operator=(ModuleProbe&&) = delete;
  ~ModuleProbe();

  std::string read_all(Clock::time_point until);
  /// How the process ended, for display. Call it after read_all().
  std::string fate();

 private:
  pid_t pid_ = -1;
  UniqueFd out_;
  bool late_ = false;
};

ModuleProbe::ModuleProbe(const std::string& program, const std::string& module) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) throw system_error("pipe");
  out_ = UniqueFd(ends[0]);
  const UniqueFd write_end(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::string arguments[] = {program, module};
  char* argv[] = {arguments[0].data(), arguments[1].data(), nullptr};
  std::vector<std::string> environment = base::environment_with({});
  std::vector<char*> envp;
  for (std::string& entry : environment) envp.push_back(entry.data());
  envp.push_back(nullptr);
  // A launcher may signal all processes it has started; only a crash may end this one early.
  sigset_t blocked;
  ::sigfillset(&blocked);
  for (const int crash : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS}) ::sigdelset(&blocked, crash);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setsigmask(&attributes, &blocked);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int failed = ::posix_spawn(&pid_, program.c_str(), &actions, &attributes, argv, envp.data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) pid_ = -1;
  if (failed != 0) throw system_error("can't start " + program, failed);
}

ModuleProbe::~ModuleProbe() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);  // its report is complete; don't wait for the vendors' libraries to exit
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

std::string ModuleProbe::read_all(Clock::time_point until) {
  std::string text;
  std::array<char, 4096> chunk{};
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd entry{out_.get(), POLLIN, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::max<std::int64_t>(left, 0)));
    if (ready < 0 && errno == EINTR) continue;
    late_ = ready == 0;
    if (ready <= 0) return text;
    const ssize_t count = ::read(out_.get(), chunk.data(), chunk.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(chunk.data(), static_cast<std::size_t>(count));
  }
}

std::string ModuleProbe::fate() {
  if (late_) return "no answer within " + std::to_string(kPatience.count()) + " s";
  int status = 0;
  if (::waitpid(pid_, &status, 0) != pid_) return "no answer";
  pid_ = -1;
  if (WIFSIGNALED(status)) return "the process that loaded it was ended by signal " + std::to_string(WTERMSIG(status));
  return "the process that loaded it ended with code " + std::to_string(WEXITSTATUS(status));
}

void write_line(std::string& to, std::string_view key, std::string_view value) {
  to.append(key).append(1, ' ');
  std::replace_copy(value.begin(), value.end(), std::back_inserter(to), '\n', ' ');
  to += '\n';
}

}  // namespace

std::string describe_module(const std::string& path) {
  const std::string stem = std::filesystem::path(path).stem().string();
  std::string text;
  try {
    const Backend& backend = *load_module({stem.substr(0, stem.find('-')), path, ""});
    write_line(text, "devices", backend.devices);
    for (const std::string_view part : backend.launch_prefix) write_line(text, "launch", part);
    for (const EnvVariable& variable : backend.variables) {
      write_line(text, "variable", variable.name);
      write_line(text, "default", variable.default_value);
      write_line(text, "help", variable.help);
    }
    write_line(text, "reason", backend.probe());
  } catch (const std::exception& error) {
    write_line(text, "reason", error.what());
  }
  write_line(text, "end", "");
  return text;
}

bool read_report(const std::string& text, BackendState& report) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line) && !lines.eof();) {
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string key = line.substr(0, space);
    std::string value = line.substr(std::min(space + 1, line.size()));
    if (key == "end") return true;
    const bool of_variable = !report.variables.empty();
    if (key == "devices") {
      report.devices = std::move(value);
    } else if (key == "reason") {
      report.reason = std::move(value);
    } else if (key == "launch") {
      report.launch_prefix.push_back(std::move(value));
    } else if (key == "variable") {
      report.variables.push_back({std::move(value), "", ""});
    } else if (key == "default" && of_variable) {
      report.variables.back().default_value = std::move(value);
    } else if (key == "help" && of_variable) {
      report.variables.back().help = std::move(value);
    }
  }
  return false;
}

std::vector<BackendState> probe_modules(std::span<const ModuleFile> files) {
  const std::string program = base::module_directory() + "/module-probe";
  std::vector<BackendState> reports;
  std::vector<std::optional<ModuleProbe>> probes;  // all at once, since each takes a while
  for (const ModuleFile& file : files) {
    BackendState& report = reports.emplace_back(BackendState{.name = file.backend, .reason = file.problem});
    probes.emplace_back();
    if (!file.problem.empty()) continue;
    try {
      probes.back().emplace(program, file.path);
    } catch (const Error& error) {
      report.reason = error.what();
    }
  }
  const Clock::time_point until = Clock::now() + kPatience;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    if (probes[i] && !read_report(probes[i]->read_all(until), reports[i]))
      reports[i].reason = files[i].path + ": " + probes[i]->fate();
    reports[i].available = reports[i].reason.empty();
  }
  return reports;
}

}  // namespace tessera::comm
