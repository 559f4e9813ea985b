// Transports that are correct except for MPI's own collectives: the faults of the negative controls.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <utility>

#include "tessera/comm/native_collectives.h"
#include "tessera/comm/transport.h"

namespace tessera::mpi_test {

using namespace tessera::comm;

/// Makes MPI compute something else than the caller requested.
class WrongCollectives final : public NativeCollectives {
 public:
  static constexpr bool kNeedsPolls = false;
  explicit WrongCollectives(NativeCollectives& right) : right_(right) {}
  std::unique_ptr<NativeCommunicator> whole_world() override { return right_.whole_world(); }
  bool prefers(const CollectiveSpec& problem) const noexcept override { return right_.prefers(problem); }
  void start(NativeRequest& what) noexcept override {
    if (what.dtype == DType::bf16) what.dtype = DType::f16;  // the right bytes, another arithmetic
    if (what.dtype == DType::i32) what.reduce = ReduceOp::Kind::max;
    if (what.dtype == DType::u8 && what.count > 1) --what.count;
    right_.start(what);
  }
  void cancel(NativeRequest& what) noexcept override { right_.cancel(what); }

 private:
  NativeCollectives& right_;
};

/// Lets MPI continue canceled operations, so it writes memory that belongs to the caller again. The second sum begins
/// late: a rank that is stopped meanwhile still has all of it to do when it resumes, so it does write.
class UnstoppedCollectives final : public NativeCollectives, NativeOwner {
 public:
  static constexpr bool kNeedsPolls = true;  ///< also when no thread waits any more
  explicit UnstoppedCollectives(NativeCollectives& right) : right_(right) {}
  std::unique_ptr<NativeCommunicator> whole_world() override { return right_.whole_world(); }
  bool prefers(const CollectiveSpec& problem) const noexcept override { return right_.prefers(problem); }
  void start(NativeRequest& what) noexcept override {
    Started& started = started_.emplace_back(Started{what, &what});
    started.own.owner = this;
    started.own.index = static_cast<std::uint32_t>(started_.size() - 1);
    if (what.kind == OpKind::all_reduce && ++sums_ == 2) std::this_thread::sleep_for(kLate);
    right_.start(started.own);
  }
  void cancel(NativeRequest& what) noexcept override {
    for (Started& started : started_)
      if (started.callers == &what) started.callers = nullptr;
  }

 private:
  static constexpr auto kLate = std::chrono::milliseconds(1500);
  struct Started {
    NativeRequest own;
    NativeRequest* callers = nullptr;  ///< null: completed or canceled
  };
  void native_done(NativeRequest& own) noexcept override {
    if (NativeRequest* const callers = std::exchange(started_[own.index].callers, nullptr))
      callers->owner->native_done(*callers);
  }

  NativeCollectives& right_;
  int sums_ = 0;
  std::deque<Started> started_;  ///< never erased: MPI holds their addresses
};

template <class Collectives>
class TransportWith final : public Transport {
 public:
  explicit TransportWith(std::unique_ptr<Transport> right) : right_(std::move(right)), native_(*right_->native()) {}
  void send(Message& message) noexcept override { right_->send(message); }
  void receive(Message& message) noexcept override { right_->receive(message); }
  void cancel(Message& message) noexcept override { right_->cancel(message); }
  bool arrived(int peer, const MessageTag& tag) noexcept override { return right_->arrived(peer, tag); }
  bool knows_arrivals() const noexcept override { return right_->knows_arrivals(); }
  void discard_communicator(std::uint32_t communicator) noexcept override {
    right_->discard_communicator(communicator);
  }
  bool poll(bool with_health_check) noexcept override { return right_->poll(with_health_check); }
  bool needs_polls() const noexcept override { return Collectives::kNeedsPolls || right_->needs_polls(); }
  ProgressWaiter& waiter() noexcept override { return right_->waiter(); }
  NativeCollectives* native() noexcept override { return &native_; }
  void close(bool failed) noexcept override { right_->close(failed); }

 private:
  const std::unique_ptr<Transport> right_;
  Collectives native_;
};

template <class Collectives>
std::unique_ptr<Transport> with_collectives(std::unique_ptr<Transport> right) {
  return std::make_unique<TransportWith<Collectives>>(std::move(right));
}

}  // namespace tessera::mpi_test
