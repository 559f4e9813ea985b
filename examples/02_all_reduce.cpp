// Adds one vector per rank; every rank gets the sum.  tessera run -n 4 -- ./02_all_reduce
#include <cstdio>
#include <vector>

#include "tessera/comm/init.h"

using namespace tessera;

int main() {
  const auto world = comm::init();
  std::vector<float> mine(8), sum(8);
  for (int i = 0; i < 8; ++i) mine[i] = static_cast<float>(i + 10 * world->rank());

  comm::Work work =
      world->all_reduce(comm::view_of(mine.data(), 8), comm::view_of(sum.data(), 8), comm::ReduceOp::sum());
  // ... compute something else meanwhile ...
  work.wait();

  if (world->rank() != 0) return 0;
  for (const float value : sum) std::printf("%g ", value);
  std::printf("\nbytes sent by rank 0: %llu\n", static_cast<unsigned long long>(world->traffic().bytes_sent()));
}
