// Operations that nobody waits for: their callbacks, and works that are detached.
#include <atomic>
#include <chrono>
#include <memory>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

using namespace std::chrono_literals;
using Values = std::vector<std::int64_t>;

constexpr auto kLimit = 60s;

View view(Values& values) { return view_of(values.data(), values.size()); }

/// What the callback of one operation saw.
struct Call {
  Values in, out;
  std::int64_t want = 0;
  std::atomic<int> calls{0};
  std::atomic<bool> right{false};
  Work work;
};

/// Each callback is called once, after its operation, whether the work is waited for, kept or detached.
std::string callbacks(Communicator& world) {
  constexpr int kCalls = 60;
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  const std::int64_t ranks = world.size();
  std::vector<Call> calls(kCalls);
  std::counting_semaphore<> ended(0);
  for (int i = 0; i < kCalls; ++i) {
    Call& call = calls[static_cast<std::size_t>(i)];
    const std::size_t count = i % 2 == 0 ? 1 + static_cast<std::size_t>(i) : static_cast<std::size_t>(i) * 5'003;
    call.in.assign(count, world.rank() + i);
    call.out.assign(count, -1);
    const bool message = i % 3 == 1;
    call.want = message ? previous + i : ranks * (ranks - 1) / 2 + i * ranks;
    if (message) {
      const std::vector<P2POp> parts = {P2POp::send(view(call.in), next), P2POp::recv(view(call.out), previous)};
      call.work = world.batch(parts);
    } else {
      call.work = world.all_reduce(view(call.in), view(call.out), ReduceOp::sum());
    }
    call.work.on_done([&call, &ended](const std::exception_ptr& error) {
      call.right = error == nullptr && call.out == Values(call.out.size(), call.want);
      ++call.calls;
      ended.release();
    });
    if (i % 5 == 0) call.work.wait();
    if (i % 5 == 1) call.work.detach();
  }
  for (int i = 0; i < kCalls; ++i)
    if (!ended.try_acquire_for(kLimit)) return "only " + std::to_string(i) + " callbacks were called";
  for (int i = 0; i < kCalls; ++i) {
    Call& call = calls[static_cast<std::size_t>(i)];
    call.work.wait();
    const std::string name = "call " + std::to_string(i);
    if (!call.right) return name + ": its callback saw an error or a wrong result";
    // A callback that is called later would release the semaphore once more.
    if (call.calls != 1) return name + ": its callback was called " + std::to_string(call.calls) + " times";
  }
  bool called = false;
  calls[0].work.on_done([&](const std::exception_ptr&) { called = true; });
  if (!called) return "on_done() of an ended operation did not call back at once";
  if (ended.try_acquire()) return "a callback was called twice";
  return {};
}

/// A detached send returns at once, although its receiver comes late; and the communicator's end waits for callbacks.
std::string detached(Communicator& world) {
  constexpr std::size_t kCount = 500'000;
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  Values sent(kCount, world.rank());
  Values received(kCount, -1);
  auto inner = world.split(0, world.rank());
  std::atomic<int> ended{0};
  {
    Work send = inner->send(view(sent), next);
    send.on_done([&](const std::exception_ptr& error) {
      std::this_thread::sleep_for(20ms);
      ended += error == nullptr ? 1 : 1000;
    });
    send.detach();
    if (!send.done()) return "a detached work is not a completed one";
  }
  // Every rank gets here before any receives: a send that blocked would never end.
  world.barrier().wait();
  Work receive = inner->recv(view(received), previous);
  receive.on_done([&](const std::exception_ptr& error) {
    std::this_thread::sleep_for(20ms);
    ended += error == nullptr ? 1 : 1000;
  });
  receive.detach();
  inner.reset();
  if (ended != 2) return "the communicator ended before its callbacks: " + std::to_string(ended);
  if (received != Values(kCount, previous)) return "the message is wrong";
  return {};
}

/// The callback of an operation that fails has its error.
std::string callback_of_failure(Communicator& world) {
  const auto inner = world.split(0, world.rank());
  Values received(1000);
  std::string kind = "none";
  std::binary_semaphore ended(0);
  Work receive = inner->recv(view(received), (world.rank() + 1) % world.size());  // is never sent
  receive.on_done([&](const std::exception_ptr& error) {
    try {
      if (error != nullptr) std::rethrow_exception(error);
    } catch (const Error& what) {
      kind = what.kind();
    }
    ended.release();
  });
  receive.detach();
  world.barrier().wait();  // a rank that aborts must not overtake another one
  inner->abort("a test");
  if (!ended.try_acquire_for(kLimit)) return "the callback of a failed operation was not called";
  world.barrier().wait();
  return kind == "Aborted" ? "" : "the callback's error is '" + kind + "' instead of 'Aborted'";
}

}  // namespace

std::vector<Behaviour> callback_behaviours() {
  return {
      {"callbacks", callbacks, 2}, {"detached", detached, 2}, {"the callback of a failure", callback_of_failure, 2}};
}

}  // namespace tessera::conformance
