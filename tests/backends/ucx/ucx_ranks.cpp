// One rank of the tests of the bare transport: ucx_ranks MODE
#include "backends/ucx/link.h"
#include "tests/backends/links/transport_ranks.h"

int main(int count, char** arguments) {
  if (count != 2) return 2;
  return tessera::link_test::run_transport_ranks(arguments[1], tessera::comm::ucx::make_transport);
}
