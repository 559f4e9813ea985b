// Measures how fast checkpoints are written and read, and, in turns, plain sequential writes and reads of as many bytes
// in the same folder. Writes end when the data is on the disk (fsync); reads come from the page cache.
//
//   bench_checkpoint_rate [--model gpt2] [--ranks 1] [--folder /tmp] [--rounds 5]
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/checkpoint.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/models/causal_model.h"

namespace {

using namespace tessera;
namespace fs = std::filesystem;

constexpr std::size_t kChunk = std::size_t{4} << 20;

struct Options {
  std::string model = "gpt2", directory = "/tmp";
  int ranks = 1, rounds = 5;
};

struct Rates {  // GB/s
  double save = 0, write = 0, restore = 0, read = 0;
};

double seconds_of(const std::function<void()>& work) {
  const std::int64_t begin = base::host_time_ns();
  work();
  return static_cast<double>(base::host_time_ns() - begin) * 1e-9;
}

void require(bool done, const std::string& what) {
  if (!done) throw base::system_error(what);
}

void write_plainly(const std::string& path, const std::vector<char>& memory) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  require(file >= 0, "open of " + path);
  std::size_t at = 0;
  while (at < memory.size()) {
    const ssize_t done =
        ::pwrite(file, memory.data() + at, std::min(kChunk, memory.size() - at), static_cast<off_t>(at));
    require(done > 0, "write");
    at += static_cast<std::size_t>(done);
  }
  require(::fsync(file) == 0, "fsync");
  ::close(file);
}

/// Reads into existing memory of that size, as the engine does.
void read_plainly(const std::string& path, std::vector<char>& memory) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(file >= 0, "open of " + path);
  std::size_t at = 0;
  while (at < memory.size()) {
    const ssize_t got = ::pread(file, memory.data() + at, std::min(kChunk, memory.size() - at), static_cast<off_t>(at));
    require(got > 0, "read");
    at += static_cast<std::size_t>(got);
  }
  ::close(file);
}

std::vector<Rates> measure(const Options& options) {
  std::vector<Rates> rounds(static_cast<std::size_t>(options.rounds));
  comm::InitOptions config;
  config.timeout = std::chrono::minutes(5);
  comm::run_threads(options.ranks, config, [&](comm::Communicator& world) {
    nn::Context context;
    const auto model = nn::make_model(context, nn::preset(options.model));
    fsdp::Engine engine(*model, world, {});
    engine.initialize(0);
    const auto channel = world.split(0, world.rank());
    comm::HostCollectives control(*channel, context.runtime());
    const std::string own = options.directory + "/plain-" + std::to_string(world.rank());
    std::size_t bytes = 0;
    engine.state().for_each_shard(
        [&](const fsdp::ShardRange& range) { bytes += static_cast<std::size_t>(range.range.count()) * 4; });
    std::vector<char> memory(bytes, 1);
    double total = static_cast<double>(bytes);
    control.all_reduce(&total, 1, comm::ReduceOp::sum(), "bytes");
    const auto rate = [&](const std::function<void()>& work) {
      world.barrier().wait();
      double slowest = seconds_of(work);
      control.all_reduce(&slowest, 1, comm::ReduceOp::max(), "time");
      return total / slowest * 1e-9;
    };
    for (Rates& round : rounds) {
      Rates r;
      r.write = rate([&] { write_plainly(own, memory); });
      r.save = rate([&] {
        fsdp::CheckpointWriter writer(engine, control,
                                      {.directory = options.directory, .keep_last = 1, .asynchronous = false});
        writer.save({});
      });
      r.read = rate([&] { read_plainly(own, memory); });
      r.restore = rate([&] {
        fsdp::Checkpoint checkpoint(options.directory);
        fsdp::restore(engine, checkpoint);
        context.stream().synchronize();
      });
      if (world.rank() == 0) round = r;
      world.barrier().wait();
    }
  });
  return rounds;
}

void print(const char* name, const std::vector<Rates>& rounds, double Rates::*ours, double Rates::*plain) {
  std::vector<double> ratios, rates, plains;
  for (const Rates& r : rounds) {
    ratios.push_back(r.*ours / (r.*plain));
    rates.push_back(r.*ours);
    plains.push_back(r.*plain);
  }
  const auto median = [](std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  fmt::print("{:<8} {:6.2f} GB/s, plain {:6.2f}: ratio {:.2f} ({:.2f} to {:.2f})\n", name, median(rates),
             median(plains), median(ratios), *std::min_element(ratios.begin(), ratios.end()),
             *std::max_element(ratios.begin(), ratios.end()));
}

}  // namespace

int main(int count, char** arguments) {
  CLI::App app("a checkpoint's rates beside those of plain files");
  Options options;
  app.add_option("--model", options.model)->capture_default_str();
  app.add_option("--ranks", options.ranks)->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--folder", options.directory, "where a folder of its own is made and removed")->capture_default_str();
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000))->capture_default_str();
  CLI11_PARSE(app, count, arguments);
  try {
    options.directory += "/tessera-checkpoint-rate-" + std::to_string(::getpid());
    fs::create_directories(options.directory);
    const std::vector<Rates> rounds = measure(options);
    fs::remove_all(options.directory);
    print("save", rounds, &Rates::save, &Rates::write);
    print("restore", rounds, &Rates::restore, &Rates::read);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_checkpoint_rate: {}\n", error.what());
    return 2;
  }
}
