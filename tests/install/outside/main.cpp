// A program of somebody else: all it knows is find_package(tessera).
#include <cstdio>
#include <memory>

#include "all_headers.h"  // written by the test: every header that was installed

int main() {
  using namespace tessera::base;
  const auto ledger = std::make_shared<Ledger>();
  MemoryPool pool(ledger);
  const Buffer buffer = pool.allocate(1000, MemoryUse::parameter);
  try {
    parse_dtype("f33");
  } catch (const InvalidUsage& error) {  // an exception type that crosses the library's border
    std::printf("%llu bytes; %s; %s\n", static_cast<unsigned long long>(ledger->snapshot().total_now),
                std::string(error.kind()).c_str(), error.what());
    return 0;
  }
  return 1;
}
