// In the steady state no message costs an allocation.
#include <atomic>
#include <cstdlib>
#include <new>

#include "backends/tcp/frame.h"
#include "tests/backends/tcp/support.h"

namespace {
std::atomic<std::uint64_t> allocations{0};
}

#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // GCC 12 doesn't see that the two match
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(std::size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace tessera::tcp_test {
namespace {

TEST(Allocations, NoneOnceEverythingHasBeenSeen) {
  const std::uint64_t before = allocations.load();
  const World world = make_world(2, 2);
  EXPECT_GT(allocations.load(), before) << "the control: the counter counts";
  std::vector<std::unique_ptr<Parcel>> parcels;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{100}, comm::tcp::kEagerLimit, std::size_t{300'000}})
    for (const int from : {0, 1}) {
      parcels.push_back(world[static_cast<std::size_t>(from)]->parcel(1 - from, {}, bytes));
      parcels.push_back(world[static_cast<std::size_t>(1 - from)]->parcel(from, {}, bytes));
    }
  const auto round = [&](std::uint32_t number, bool receiver_first) {
    for (std::size_t i = 0; i < parcels.size(); ++i) {
      Parcel& parcel = *parcels[i ^ (receiver_first ? 1U : 0U)];
      const bool sends = ((i ^ (receiver_first ? 1U : 0U)) & 1U) == 0;
      parcel.done = false;
      parcel.message.tag = {1, number, static_cast<std::uint32_t>(i / 2)};
      TcpTransport& transport = *static_cast<Node*>(parcel.message.owner)->transport;
      sends ? transport.send(parcel.message) : transport.receive(parcel.message);
    }
    for (bool all = false; !all;) {
      for (const auto& node : world) node->transport->poll(number % 3 == 0);
      all = true;
      for (const auto& parcel : parcels) all &= parcel->done;
    }
  };
  for (std::uint32_t i = 0; i < 200; ++i) round(i, i % 2 == 0);
  const std::uint64_t warm = allocations.load();
  for (std::uint32_t i = 200; i < 1200; ++i) round(i, i % 2 == 0);
  EXPECT_EQ(allocations.load(), warm);
  close(world);
}

}  // namespace
}  // namespace tessera::tcp_test
