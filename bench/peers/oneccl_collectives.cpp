// Times oneCCL's versions of the operations of `tessera bench`, with the method of mpi_collectives.c: every call begins
// after a barrier and takes as long as its slowest rank; the median counts. Prints a line of JSON per point. MPI only
// starts the ranks and measures the time; all timed operations are oneCCL's.
//
//   oneccl_collectives [MIN_BYTES MAX_BYTES FACTOR]
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <oneapi/ccl.hpp>
#include <vector>

namespace {

constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"};
constexpr int kMaxCalls = 500;
constexpr int kWarmUp = 3;
constexpr double kSecondsAPoint = 1.0;

void call(int what, const ccl::communicator& world, const float* in, float* out, std::size_t all, std::size_t part) {
  switch (what) {
    case 0:
      return ccl::allreduce(in, out, all, ccl::reduction::sum, world).wait();
    case 1:
      return ccl::allgatherv(in, part, out, std::vector<std::size_t>(static_cast<std::size_t>(world.size()), part),
                             world)
          .wait();
    case 2:
      return ccl::reduce_scatter(in, out, part, ccl::reduction::sum, world).wait();
    case 3:
      return ccl::broadcast(out, all, 0, world).wait();
    default:
      return ccl::alltoall(in, out, part, world).wait();
  }
}

ccl::communicator make_world(int rank, int ranks) {
  ccl::shared_ptr_class<ccl::kvs> store;
  ccl::kvs::address_type address;
  if (rank == 0) {
    store = ccl::create_main_kvs();
    address = store->get_address();
  }
  MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank != 0) store = ccl::create_kvs(address);
  return ccl::create_communicator(ranks, rank, store);
}

}  // namespace

int main(int argc, char** argv) {
  ccl::init();
  MPI_Init(&argc, &argv);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 1 && argc != 4) {
    if (rank == 0) std::fprintf(stderr, "usage: %s [MIN_BYTES MAX_BYTES FACTOR]\n", argv[0]);
    MPI_Finalize();
    return 2;
  }
  const std::size_t least = argc == 4 ? std::strtoull(argv[1], nullptr, 10) : 1024;
  const std::size_t most = argc == 4 ? std::strtoull(argv[2], nullptr, 10) : std::size_t{64} << 20;
  const std::size_t factor = argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 4;
  {
    const ccl::communicator world = make_world(rank, ranks);
    const std::vector<float> in(most / sizeof(float), static_cast<float>(rank + 1));
    std::vector<float> out(most / sizeof(float), 0);
    std::vector<double> times;
    for (std::size_t bytes = least; bytes <= most && factor > 1; bytes *= factor) {
      const std::size_t part = bytes / sizeof(float) / static_cast<std::size_t>(ranks);
      const std::size_t all = part * static_cast<std::size_t>(ranks);
      for (int what = 0; what < static_cast<int>(std::size(kNames)); ++what) {
        times.clear();
        double spent = 0;
        for (int i = -kWarmUp; i < kMaxCalls && (times.size() < 5 || spent < kSecondsAPoint); ++i) {
          MPI_Barrier(MPI_COMM_WORLD);
          const double start = MPI_Wtime();
          call(what, world, in.data(), out.data(), all, part);
          const double mine = MPI_Wtime() - start;
          double slowest = 0;
          MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
          if (i < 0) continue;
          times.push_back(slowest);
          spent += slowest;
        }
        std::sort(times.begin(), times.end());
        if (rank == 0)
          std::printf("{\"op\":\"%s\",\"bytes\":%zu,\"time_us\":%.3f,\"calls\":%zu}\n", kNames[what],
                      all * sizeof(float), times[times.size() / 2] * 1e6, times.size());
      }
    }
  }
  MPI_Finalize();
  return 0;
}
