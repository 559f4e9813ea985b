// One rank of the tests of the bare transport: mpi_ranks MODE
#include <chrono>

#include "backends/mpi/link.h"
#include "tests/backends/links/transport_ranks.h"

int main(int count, char** arguments) {
  if (count != 2) return 2;
  return tessera::link_test::run_transport_ranks(arguments[1], [](auto& bootstrap, auto& events) {
    return tessera::comm::mpi::make_transport(bootstrap, events, std::chrono::seconds(30));
  });
}
