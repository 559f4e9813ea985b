// How long many ranks take to start, and what each of them keeps open, as JSON from rank 0:
//   tessera run -n 512 -- bench_start_ranks
// The times are those since the launcher was started: until the world is made, and until a first all_reduce is done.
// The processor times are until the world is made: rank 0's, and the longest of the others.
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace {

using namespace tessera;

/// Seconds since the launcher, this process's parent, was started.
double since_launch() {
  std::ifstream file("/proc/" + std::to_string(::getppid()) + "/stat");
  std::string text(std::istreambuf_iterator<char>(file), {});
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // the third field and those behind it
  std::string field;
  for (int i = 3; i < 22; ++i) fields >> field;
  double ticks = 0, uptime = 0;
  fields >> ticks;
  std::ifstream("/proc/uptime") >> uptime;
  return uptime - ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<double>(std::distance(begin(all), end(all)));
}

/// Megabytes that this process alone keeps.
double own_memory() {
  std::ifstream file("/proc/self/smaps_rollup");
  double kib = 0;
  for (std::string word; file >> word;)
    if (double value = 0; word.starts_with("Private_") && file >> value) kib += value;
  return kib / 1024;
}

}  // namespace

int main() {
  try {
    const auto world = comm::init();
    const double made = since_launch();
    const double processor = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    float sum = 1;
    world->all_reduce(comm::view_of(&sum, 1), comm::view_of(&sum, 1), comm::ReduceOp::sum()).wait();
    std::vector<double> largest{made, since_launch(), open_descriptors(), own_memory(),
                                world->rank() == 0 ? 0 : processor};
    const comm::View all = comm::view_of(largest.data(), largest.size());
    world->all_reduce(all, all, comm::ReduceOp::max()).wait();
    const nlohmann::json result{
        {"ranks", world->size()},         {"sum", sum},
        {"made_s", largest[0]},           {"first_all_reduce_s", largest[1]},
        {"descriptors", largest[2]},      {"own_memory_mb", largest[3]},
        {"rank0_processor_s", processor}, {"others_processor_s", largest[4]},
    };
    if (world->rank() == 0) std::cout << result << '\n';
    return sum == static_cast<float>(world->size()) ? 0 : 1;
  } catch (const base::Error& error) {
    std::cerr << error.kind() << ": " << error.what() << '\n';
    return 1;
  }
}
