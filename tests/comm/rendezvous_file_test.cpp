// The file by which ranks of one host find rank 0: which owners are accepted, and which ranks it admits.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <span>
#include <sstream>
#include <thread>

#include "tessera/base/checksum.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"
#include "tests/comm/process.h"
#include "tests/comm/rendezvous.h"

namespace tessera::comm_test {
namespace {

namespace fs = std::filesystem;

/// The name that the library chooses, for a predictable job of this user.
fs::path path_of(const std::string& job) {
  std::ostringstream path;
  path << "/tmp/tessera-" << ::geteuid() << "/job-" << std::hex << base::checksum(std::as_bytes(std::span(job)));
  return path.str();
}

class RendezvousFiles : public testing::Test {
 protected:
  /// Any run may remove the directory while it is empty.
  void SetUp() override {
    for (int attempt = 0; attempt < 1000 && !fs::exists(held_); ++attempt) {
      ::mkdir(path_.parent_path().c_str(), 0700);
      write("", held_);
    }
  }
  void TearDown() override {
    fs::remove(path_);
    fs::remove(held_);
    ::rmdir(path_.parent_path().c_str());  // if no other run uses it
  }

  RendezvousOptions local(int rank, std::chrono::milliseconds timeout = 20s) const {
    return {.launch = {.launcher = "test", .rank = rank, .size = 2, .local_size = 2, .job = job_},
            .timeout = timeout,
            .master = {},
            .token = {},
            .host_id = {}};
  }
  void write(const std::string& text, const fs::path& to) const {
    std::ofstream(to) << text;
    ::chmod(to.c_str(), 0600);
  }
  /// The contents that rank 0 writes, as soon as they exist.
  std::string written() const {
    std::string text;
    for (int i = 0; i < 5000 && text.empty(); ++i) {
      std::getline(std::ifstream(path_), text);
      if (text.empty()) ::usleep(2000);
    }
    return text;
  }
  void expect_world() const {
    auto zero = come(local(0));
    auto one = come(local(1));
    EXPECT_EQ(one.get().error, "");
    EXPECT_EQ(zero.get().error, "");
  }

  const std::string job_ = "job-file-" + std::to_string(::getpid());
  const fs::path path_ = path_of(job_);
  const fs::path held_ = path_.string() + "-held";
};

TEST_F(RendezvousFiles, ConnectsRanks) {  // the control of the tests below
  auto zero = come(local(0));
  EXPECT_EQ(written().substr(0, 13), "tessera-job-1");
  EXPECT_EQ(come(local(1)).get().error, "");
  EXPECT_EQ(zero.get().error, "");
  EXPECT_FALSE(fs::exists(path_));
}

/// Another run that ends removes the directory between its creation and its use.
TEST_F(RendezvousFiles, DirectoryKeepsItsNameWhileOthersRemoveIt) {
  TearDown();  // only an empty one can be removed
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) ::rmdir(path_.parent_path().c_str());
  });
  std::set<std::string> names;
  for (int i = 0; i < 5000; ++i) names.insert(private_directory());
  stop = true;
  other.join();
  for (const std::string& name : names) ::rmdir(name.c_str());
  EXPECT_EQ(names, std::set<std::string>{path_.parent_path()});
}

TEST_F(RendezvousFiles, RejectsFifoAtOnce) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  for (const int rank : {0, 1}) {
    auto one = come(local(rank));
    ASSERT_EQ(one.wait_for(10s), std::future_status::ready) << "it waits for a writer";
    EXPECT_EQ(one.get().error, "SystemError: init: " + path_.string() +
                                   " is not private to this user; remove it, or set another TESSERA_RUN_ID");
  }
}

TEST_F(RendezvousFiles, RejectsLink) {
  const fs::path elsewhere = path_.string() + "-elsewhere";
  write("tessera-job-1 x y 1 1\n", elsewhere);
  fs::create_symlink(elsewhere, path_);
  EXPECT_NE(come(local(1)).get().error.find("is not private to this user"), std::string::npos);
  fs::remove(elsewhere);
}

/// A process that has ended or is alive; its pid and start time have the format of a job file.
struct Child {
  explicit Child(bool ended) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe(ends), 0);
    pid = ::fork();
    if (pid == 0) {
      ::close(ends[1]);
      char byte = 0;
      if (!ended && ::read(ends[0], &byte, 1) < 0) ::_exit(1);
      ::_exit(0);
    }
    ::close(ends[0]);
    end = ends[1];
    siginfo_t info = {};
    if (ended) ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);  // it remains a zombie
  }
  ~Child() {
    ::close(end);
    ::waitpid(pid, nullptr, 0);
  }
  std::string start() const {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string word;
    while (file >> word && !word.ends_with(')')) {
    }
    for (int i = 3; i <= 22; ++i) file >> word;
    return word;
  }
  pid_t pid = -1;
  int end = -1;
};

std::string left_by(const Child& child) {
  return "tessera-job-1 tessera-gone " + std::string(64, 'a') + " " + std::to_string(child.pid) + " " + child.start() +
         "\n";
}

TEST_F(RendezvousFiles, ReplacesFileOfZombie) {
  const Child zombie(true);
  write(left_by(zombie), path_);
  expect_world();
}

TEST_F(RendezvousFiles, KeepsFileOfLiveProcess) {  // the control
  const Child living(false);
  write(left_by(living), path_);
  EXPECT_EQ(come(local(0)).get().error, "InvalidUsage: init: process " + std::to_string(living.pid) +
                                            " is starting a run with the same name '" + job_ +
                                            "'; give each run its own TESSERA_RUN_ID");
}

/// A process that finds the socket in other ways does not know the contents of the file.
TEST_F(RendezvousFiles, RejectsRanksWithoutToken) {
  auto zero = come(local(0, 4s));
  std::istringstream words(written());
  std::string magic, socket, token, rest;
  words >> magic >> socket >> token;
  std::getline(words, rest);
  token[0] = token[0] == '0' ? '1' : '0';
  const fs::path aside = path_.string() + "-aside";
  write(magic + " " + socket + " " + token + rest + "\n", aside);
  fs::rename(aside, path_);
  const std::string error = come(local(1, 1s)).get().error;
  EXPECT_NE(error.find(path_.string() + ": authentication failed; use the same TESSERA_TOKEN"), std::string::npos)
      << error;
  EXPECT_NE(zero.get().error.find("rank 1 did not connect"), std::string::npos);
}

}  // namespace
}  // namespace tessera::comm_test
