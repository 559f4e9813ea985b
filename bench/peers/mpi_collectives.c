/* Times an MPI library's versions of the operations of `tessera bench`, with the same method: every call begins after a
 * barrier and takes as long as its slowest rank; the median counts. Prints a line of JSON per point.
 *
 *   mpicc -O2 mpi_collectives.c -o mpi_collectives
 *   mpirun -n 2 ./mpi_collectives [blocking|nonblocking] [MIN_BYTES MAX_BYTES FACTOR]
 *
 * A size is the total, as in nccl-tests: for all_gather, reduce_scatter and all_to_all it is the count per rank x ranks.
 * nonblocking: the I-form of the call, then MPI_Test until it completes. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMaxCalls = 500, kWarmUp = 3 };
static const double kSecondsAPoint = 1.0; /* some libraries need 10 ms per call if ranks share a core */

static const char* const kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"};
enum { kOperations = sizeof kNames / sizeof kNames[0] };

static int ascending(const void* left, const void* right) {
  const double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

/* MPI's broadcast has one buffer: `out`, which the root fills. */
static void blocking_call(int what, const float* in, float* out, int all, int part) {
  if (what == 0) MPI_Allreduce(in, out, all, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (what == 1) MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
  if (what == 2) MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (what == 3) MPI_Bcast(out, all, MPI_FLOAT, 0, MPI_COMM_WORLD);
  if (what == 4) MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void nonblocking_call(int what, const float* in, float* out, int all, int part) {
  MPI_Request request;
  int done = 0;
  if (what == 0) MPI_Iallreduce(in, out, all, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
  if (what == 1) MPI_Iallgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD, &request);
  if (what == 2) MPI_Ireduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
  if (what == 3) MPI_Ibcast(out, all, MPI_FLOAT, 0, MPI_COMM_WORLD, &request);
  if (what == 4) MPI_Ialltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD, &request);
  while (!done) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int nonblocking = argc > 1 && strcmp(argv[1], "nonblocking") == 0;
  if ((argc > 1 && !nonblocking && strcmp(argv[1], "blocking") != 0) || (argc > 2 && argc != 5)) {
    if (rank == 0) fprintf(stderr, "usage: %s [blocking|nonblocking] [MIN_BYTES MAX_BYTES FACTOR]\n", argv[0]);
    MPI_Finalize();
    return 2;
  }
  const size_t least = argc == 5 ? strtoull(argv[2], NULL, 10) : 1024;
  const size_t most = argc == 5 ? strtoull(argv[3], NULL, 10) : (size_t)64 << 20;
  const size_t factor = argc == 5 ? strtoull(argv[4], NULL, 10) : 4;
  float* in = malloc(most);
  float* out = malloc(most);
  double* times = malloc(kMaxCalls * sizeof(double));
  for (size_t i = 0; i < most / sizeof(float); ++i) in[i] = (float)(rank + 1);
  memset(out, 0, most);
  for (size_t bytes = least; bytes <= most && factor > 1; bytes *= factor) {
    const int part = (int)(bytes / sizeof(float) / (size_t)ranks), all = part * ranks;
    for (int what = 0; what < kOperations; ++what) {
      int calls = 0;
      double spent = 0;
      for (int i = -kWarmUp; i < kMaxCalls && (calls < 5 || spent < kSecondsAPoint); ++i) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = MPI_Wtime();
        (nonblocking ? nonblocking_call : blocking_call)(what, in, out, all, part);
        double mine = MPI_Wtime() - start, slowest;
        MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD); /* so all ranks stop together */
        if (i < 0) continue;
        times[calls++] = slowest;
        spent += slowest;
      }
      qsort(times, (size_t)calls, sizeof(double), ascending);
      if (rank == 0)
        printf("{\"op\":\"%s\",\"bytes\":%zu,\"time_us\":%.3f,\"calls\":%d}\n", kNames[what], (size_t)all * sizeof(float),
               times[calls / 2] * 1e6, calls);
    }
  }
  free(times);
  free(out);
  free(in);
  MPI_Finalize();
  return 0;
}
