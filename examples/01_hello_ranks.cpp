// Prints a greeting from every rank, in order. Run it alone, or on four ranks:  tessera run -n 4 -- ./01_hello_ranks
#include <cstdio>

#include "tessera/comm/init.h"

int main() {
  const auto world = tessera::comm::init();
  for (int turn = 0; turn < world->size(); ++turn) {
    if (turn == world->rank()) {
      std::printf("hello from rank %d of %d over %s\n", world->rank(), world->size(),
                  std::string(world->backend()).c_str());
      std::fflush(stdout);
    }
    world->barrier().wait();
  }
}
