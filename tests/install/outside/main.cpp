// A program outside the project: it uses nothing but find_package(tessera).
#include <cstdio>
#include <memory>
#include <vector>

#include "all_headers.h"  // written by the test: every installed header

/// All ranks of a backend that this program does not name add 1, 2 and 3.
int use_backend(const char* name) {
  try {
    float sum = 0;
    tessera::comm::run_threads(3, {.backend = name}, [&](tessera::comm::Communicator& world) {
      std::vector<float> values(100'000, static_cast<float>(world.rank() + 1));
      const auto view = tessera::comm::view_of(values.data(), values.size());
      world.all_reduce(view, view, tessera::comm::ReduceOp::sum()).wait();
      if (world.rank() == 0) sum = values.back();
    });
    std::printf("the %s backend: %g\n", name, static_cast<double>(sum));
    return 0;
  } catch (const tessera::base::Error& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}

int main(int count, char** arguments) {
  if (count > 1) return use_backend(arguments[1]);
  using namespace tessera::base;
  const auto memory_tracker = std::make_shared<MemoryTracker>();
  MemoryPool pool(memory_tracker);
  const Buffer buffer = pool.allocate(1000, MemoryCategory::parameter);
  try {
    parse_dtype("f33");
  } catch (const InvalidUsage& error) {  // an exception type that crosses the library boundary
    std::printf("%llu bytes; %s; %s\n", static_cast<unsigned long long>(memory_tracker->snapshot().total_now),
                std::string(error.kind()).c_str(), error.what());
    return 0;
  }
  return 1;
}
