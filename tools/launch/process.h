// Child processes of the launcher.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::tools {

/// A file descriptor with an owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { close(); }
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  int release();
  void close();

 private:
  int number_ = -1;
};

struct Pipe {
  Descriptor read_end;
  Descriptor write_end;
};
/// Closed on exec at both ends. Throws SystemError.
Pipe make_pipe();

struct ProcessSpec {
  std::vector<std::string> command;      ///< looked up in PATH
  std::vector<std::string> environment;  ///< NAME=value
  int output = -1;                       ///< becomes its standard output; -1: as ours
  int errors = -1;                       ///< likewise for standard error
  std::vector<int> cores;                ///< empty: as ours
  bool reads_input = true;               ///< shares our standard input; else it reads nothing
};

/// Starts a program that dies with this process. Throws InvalidUsage where there is no such program, else SystemError.
pid_t start_process(const ProcessSpec& plan);

/// The cores that this process may use.
std::vector<int> allowed_cores();

/// A helper process that outlives a launcher which dies unexpectedly, just long enough to kill every process whose
/// environment has `marker` in it: the ranks' own children too. It ends by itself with the object.
class OrphanReaper {
 public:
  explicit OrphanReaper(const std::string& marker);
  ~OrphanReaper();
  OrphanReaper(const OrphanReaper&) = delete;
  OrphanReaper& operator=(const OrphanReaper&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  Descriptor lifeline_;
};

}  // namespace tessera::tools
