// The common base of decorators: a communicator around another one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/comm/completion_poller.h"

namespace tessera::decorators {

using namespace base;  // NOLINT(google-build-using-namespace): one place, see the rules
using namespace comm;  // NOLINT(google-build-using-namespace)

/// State shared by a decorated communicator and all that are split from it.
struct Family {
  explicit Family(int world_rank) : rank(world_rank) {}
  const int rank;  ///< of the first communicator
  std::atomic<std::uint64_t> calls{0};
  std::atomic<int> communicators{0};
};

/// Forwards everything to the communicator that it owns: backend, capabilities, memory and traffic are those of the
/// inner one. A rank's calls are numbered from 1 over the whole family (a batch is one call), so that "call 12" means
/// the same in every run.
class Decorator : public Communicator {
 public:
  const Capabilities& capabilities() const noexcept final { return inner_->capabilities(); }

 protected:
  /// `family`: null for the first communicator of a family.
  Decorator(std::unique_ptr<Communicator> inner, std::shared_ptr<Family> family);
  Communicator& inner() noexcept { return *inner_; }
  const std::shared_ptr<Family>& family() const noexcept { return family_; }
  int index() const noexcept { return index_; }  ///< order of creation in this rank's family

  /// Issues the same calls on the inner communicator: one call, or the parts of a batch.
  Work forward(std::span<const OpDesc> calls, bool batch);
  /// The stream that the call is ordered after, or null.
  Stream* after() const noexcept { return after_; }
  /// Of the works of this communicator.
  CompletionPoller& completions() noexcept { return completions_; }

 private:
  virtual Work do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) = 0;
  virtual std::unique_ptr<Communicator> decorate_child(std::unique_ptr<Communicator> child) = 0;

  Work do_start(const OpDesc& call) final;
  Work do_batch(std::span<const OpDesc> parts) final;
  Work run(std::span<const OpDesc> calls, bool batch);
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) final;
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) final;
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) final;
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) final;
  void do_abort(std::string_view reason) noexcept override;
  void do_after(Stream& stream) final { after_ = &stream; }
  std::string_view do_last_algorithm() const noexcept final { return inner_->last_algorithm(); }
  void do_traffic(TrafficStats& snapshot) const final { snapshot = inner_->traffic(); }

  const std::unique_ptr<Communicator> inner_;
  const std::shared_ptr<Family> family_;
  const int index_;
  Stream* after_ = nullptr;
  CompletionPoller completions_;
};

/// A work around another one. Heap-allocated, because decorators are for observation and tests. done() must tolerate
/// another thread that waits.
class WrappedWork : public WorkState {
 public:
  bool done() noexcept override { return inner_.done(); }
  bool wait_until(std::chrono::steady_clock::time_point until) override { return inner_.wait_until(until); }
  void wait() override { inner_.wait(); }
  void on_done(WorkCallback callback) override { completions_.add(*this, std::move(callback)); }

 protected:
  /// `completions`: those of its communicator.
  WrappedWork(Work inner, CompletionPoller& completions) : inner_(std::move(inner)), completions_(completions) {}
  Work& inner() noexcept { return inner_; }
  void recycle() noexcept override { delete this; }

 private:
  Work inner_;
  CompletionPoller& completions_;
};

/// Bytes of the larger buffer; summed over a batch's parts.
std::uint64_t bytes_of(std::span<const OpDesc> calls);
/// "all_gather", "batch".
std::string_view name_of(std::span<const OpDesc> calls, bool batch);
/// "all_gather #12 (block.3)".
std::string describe(std::span<const OpDesc> calls, bool batch, std::uint64_t number);

}  // namespace tessera::decorators
