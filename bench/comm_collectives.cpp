// Collectives as mpi_collectives.c of the peers measures them: the median over iterations of the slowest rank's time,
// and beside it what memcpy does on the same machine in the same run. Start it as ranks: under mpirun, or with
// TESSERA_RANK and TESSERA_WORLD_SIZE. Arguments: "window" (memory of the communicator, the default) or "ordinary".
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tessera/comm/context.h"

namespace {

using namespace tessera::comm;
using tessera::base::MemoryUse;

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double slowest(Communicator& comm, double mine) {
  comm.all_reduce(view_of(&mine, 1), view_of(&mine, 1), ReduceOp::max()).wait();
  return mine;
}

template <class F>
double median_us(Communicator& comm, int iterations, F&& operation) {
  std::vector<double> times;
  for (int i = -3; i < iterations; ++i) {
    comm.barrier().wait();
    const double start = now_us();
    operation();
    const double time = slowest(comm, now_us() - start);
    if (i >= 0) times.push_back(time);
  }
  std::nth_element(times.begin(), times.begin() + iterations / 2, times.end());
  return times[static_cast<std::size_t>(iterations) / 2];
}

void measure(Communicator& comm, float* in, float* out, std::size_t bytes) {
  const auto n = static_cast<std::size_t>(comm.size());
  const std::size_t count = bytes / sizeof(float) / n * n;
  const int iterations = bytes < 100'000 ? 500 : (bytes < 5'000'000 ? 60 : 15);
  for (const OpKind kind : {OpKind::all_reduce, OpKind::all_gather, OpKind::reduce_scatter}) {
    const double time = median_us(comm, iterations, [&] {
      if (kind == OpKind::all_reduce) comm.all_reduce(view_of(in, count), view_of(out, count), ReduceOp::sum()).wait();
      if (kind == OpKind::all_gather) comm.all_gather(view_of(in, count / n), view_of(out, count)).wait();
      if (kind == OpKind::reduce_scatter)
        comm.reduce_scatter(view_of(in, count), view_of(out, count / n), ReduceOp::sum()).wait();
    });
    const double factor =
        (kind == OpKind::all_reduce ? 2.0 : 1.0) * static_cast<double>(n - 1) / static_cast<double>(n);
    if (comm.rank() == 0)
      std::printf("%-15s n=%zu %10zu B %10.1f us  busbw %7.2f GB/s\n", std::string(name_of(kind)).c_str(), n, bytes,
                  time, static_cast<double>(bytes) / time / 1e3 * factor);
  }
}

}  // namespace

int main(int arguments, char** argument) {
  const bool ordinary = arguments > 1 && std::strcmp(argument[1], "ordinary") == 0;
  constexpr std::size_t kMost = std::size_t{64} << 20;
  const auto comm = init({.algorithms = std::nullopt});
  tessera::base::Buffer windows[2];
  std::vector<float> memory[2];
  float* data[2];
  for (int i = 0; i < 2; ++i) {
    if (ordinary) {
      memory[i].resize(kMost / sizeof(float));
    } else {
      windows[i] = comm->allocate(kMost, MemoryKind::host, MemoryUse::other);
    }
    data[i] = ordinary ? memory[i].data() : static_cast<float*>(windows[i].data());
    std::fill_n(data[i], kMost / sizeof(float), 1.0f);
  }
  const double copy = median_us(*comm, 9, [&] { std::memcpy(data[1], data[0], kMost); });
  if (comm->rank() == 0)
    std::printf("memcpy of 64 MiB by all ranks: %.2f GB/s each\n", static_cast<double>(kMost) / copy / 1e3);
  for (std::size_t bytes = 1024; bytes <= kMost; bytes *= 4) measure(*comm, data[0], data[1], bytes);
  return 0;
}
