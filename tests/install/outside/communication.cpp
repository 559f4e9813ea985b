// A program that communicates and needs neither models nor engine: it links tessera::comm alone.
#include <cstdio>

#include "tessera/comm/init.h"

int main() {
  using namespace tessera::comm;
  float sum = 0;
  run_threads(3, {.backend = "shm"}, [&](Communicator& world) {
    float value = static_cast<float>(world.rank() + 1);
    world.all_reduce(view_of(&value, 1), view_of(&value, 1), ReduceOp::sum()).wait();
    if (world.rank() == 0) sum = value;
  });
  std::printf("sum %g\n", static_cast<double>(sum));
}
