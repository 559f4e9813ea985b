// In the steady state no message costs an allocation.
#include <atomic>
#include <cstdlib>
#include <new>

#include "backends/tcp/frame.h"
#include "tests/backends/tcp/support.h"

namespace {
std::atomic<std::uint64_t> allocations{0};
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // GCC doesn't see that the two match
#endif
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

TEST(Allocations, SteadyStateAllocatesNothing) {
  const std::uint64_t before = allocations.load();
  const World world = make_world(2, 2);
  EXPECT_GT(allocations.load(), before) << "the control: the counter counts";
  std::vector<std::unique_ptr<TestMessage>> test_messages;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{100}, comm::tcp::kEagerLimit, std::size_t{300'000}})
    for (const int from : {0, 1}) {
      test_messages.push_back(world[static_cast<std::size_t>(from)]->test_message(1 - from, {}, bytes));
      test_messages.push_back(world[static_cast<std::size_t>(1 - from)]->test_message(from, {}, bytes));
    }
  const auto round = [&](std::uint32_t number, bool receiver_first) {
    for (std::size_t i = 0; i < test_messages.size(); ++i) {
      TestMessage& test_message = *test_messages[i ^ (receiver_first ? 1U : 0U)];
      const bool sends = ((i ^ (receiver_first ? 1U : 0U)) & 1U) == 0;
      test_message.done = false;
      test_message.message.tag = {1, number, static_cast<std::uint32_t>(i / 2)};
      TcpTransport& transport = *static_cast<Node*>(test_message.message.owner)->transport;
      sends ? transport.send(test_message.message) : transport.receive(test_message.message);
    }
    for (bool all = false; !all;) {
      for (const auto& node : world) node->transport->poll(number % 3 == 0);
      all = true;
      for (const auto& test_message : test_messages) all &= test_message->done;
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
