// A rank of the control channels' tests: executes the commands of standard input and prints the events, one a line.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/rendezvous.h"
#include "tessera/comm/registry.h"

namespace {

using namespace tessera::comm;

void say(const std::string& text) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

std::string setting(const std::string& name) { return tessera::base::read_foreign_env(name).value_or(""); }

std::unique_ptr<ControlChannel> open(Bootstrap& bootstrap, const std::string& name) {
  return bootstrap.open_channel(
      name, {.lost = [name](int rank) { say("lost " + std::to_string(rank) + " on " + name); },
             .message =
                 [name](int from, std::string_view message) {
                   const std::string text(message.substr(0, 60));
                   say("told " + name + " " + std::to_string(from) + " " + std::to_string(message.size()) + " " + text);
                 }});
}

/// Ends the connections of a process that stays alive.
void hang_up() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ::shutdown(std::stoi(entry.path().filename()), SHUT_RDWR);  // descriptors that are not sockets are unaffected
}

/// `fan_out` of the tree of the control channels; 0: a star.
std::shared_ptr<Bootstrap> rendezvous_with_others(int fan_out) {
  return rendezvous({.launch = resolve_launch(),
                     .timeout = tessera::base::parse_duration(setting("TESSERA_TIMEOUT"), "timeout"),
                     .master = setting("TESSERA_MASTER"),
                     .token = setting("TESSERA_TOKEN"),
                     .host_id = setting("TESSERA_HOST_ID"),
                     .largest_star = fan_out > 0 ? 1 : 1'000'000,
                     .tree_fan_out = fan_out});
}

/// Sends numbered messages and prints the duration of the slowest call in milliseconds.
void flood(ControlChannel& channel, int to, int count, std::size_t bytes, std::chrono::milliseconds pause) {
  std::chrono::steady_clock::duration longest{};
  for (int i = 0; i < count; ++i) {
    std::string text = std::to_string(i);
    text.resize(std::max(bytes, text.size()), ' ');
    const auto before = std::chrono::steady_clock::now();
    channel.send(to, text);
    longest = std::max(longest, std::chrono::steady_clock::now() - before);
    std::this_thread::sleep_for(pause);
  }
  say("flooded " + std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(longest).count()));
}

class Rank {
 public:
  explicit Rank(int fan_out) : bootstrap_(rendezvous_with_others(fan_out)) {
    channels_["test"] = open(*bootstrap_, "test");
  }

  void obey(std::istringstream words) {
    std::string verb;
    std::string name;
    std::string text;
    int to = 0;
    words >> verb;
    if (verb == "tell") {  // tell TO TEXT
      words >> to >> text;
      channels_.at("test")->send(to, text);
    } else if (verb == "say") {  // say CHANNEL TO TEXT
      words >> name >> to >> text;
      channels_.at(name)->send(to, text);
    } else if (verb == "flood") {  // flood TO COUNT BYTES [PAUSE]
      int count = 0;
      std::size_t bytes = 0;
      int pause = 0;
      words >> to >> count >> bytes >> pause;
      flood(*channels_.at("test"), to, count, bytes, std::chrono::milliseconds(pause));
    } else if (verb == "open") {
      words >> name;
      channels_[name] = open(*bootstrap_, name);
      say("opened " + name);
    } else if (verb == "close") {
      words >> name;
      channels_.erase(name);
      say("closed " + name);
    } else if (verb == "where") {
      const std::set<std::string> hosts(bootstrap_->hosts().begin(), bootstrap_->hosts().end());
      say("at " + bootstrap_->local_address() + " of " + std::to_string(hosts.size()) + " hosts");
    } else if (verb == "count") {  // its descriptors
      const std::filesystem::directory_iterator files("/proc/self/fd");
      say("has " + std::to_string(std::distance(begin(files), end(files))));
    } else if (verb == "hang-up") {
      hang_up();
    } else if (verb == "fork") {  // the child keeps our connections open
      if (::fork() == 0) {
        ::sleep(30);
        ::_exit(0);
      }
      say("forked");
    }
  }

 private:
  const std::shared_ptr<Bootstrap> bootstrap_;
  std::map<std::string, std::unique_ptr<ControlChannel>> channels_;
};

/// Prints the result of an all_reduce for each line of standard input.
int run_world(int fan_out, const std::string& backend) {
  BackendOptions options;
  options.communicator.timeout = std::chrono::seconds(3);
  const auto world = find_backend(backend).create(rendezvous_with_others(fan_out), options);
  say("ready");
  for (std::string line; std::getline(std::cin, line);) {
    float x = 1;
    world->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
    say("sum " + std::to_string(static_cast<int>(x)));
  }
  return 0;
}

/// `mode`: FAN_OUT, or FAN_OUT BACKEND.
int run(std::istringstream mode) {
  int fan_out = 0;
  std::string backend;
  mode >> fan_out >> backend;
  if (!backend.empty()) return run_world(fan_out, backend);
  Rank rank(fan_out);
  say("ready");
  for (std::string line; std::getline(std::cin, line);) rank.obey(std::istringstream(line));
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  try {
    return run(std::istringstream(arguments[1]));
  } catch (const tessera::base::Error& error) {
    say(std::string(error.kind()) + ": " + error.what());
  } catch (const std::exception& error) {
    say(std::string("other: ") + error.what());
  }
  return 3;
}
