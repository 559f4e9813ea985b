// PyTorch's handle of one or several operations of the library.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/tensors.h"
#include "tessera/comm/work.h"

namespace tessera::c10d_backend {

/// Operations in flight with what they need. Their callbacks own it together with the TorchWorks that show it, so that
/// it outlives the operations.
class PendingCall {
 public:
  PendingCall(std::vector<comm::Work> works, Holding holding)
      : works_(std::move(works)), holding_(std::move(holding)), source_(holding_.source) {}

  bool done();
  /// False: not done before `until`. Throws the library's error.
  bool wait_until(std::chrono::steady_clock::time_point until);
  /// Whether all operations have succeeded and their results are where they belong.
  bool finished() const noexcept { return finished_.load(); }
  /// The sender's rank, of a receive that has ended; null: of no receive.
  const int* source() const noexcept { return source_.get(); }
  /// Calls `ended` with the first error, or null when all results are where they belong.
  static void on_done(const std::shared_ptr<PendingCall>& call, const comm::WorkCallback& ended);

 private:
  void finish();

  std::vector<comm::Work> works_;
  std::mutex mutex_;
  Holding holding_;  ///< guarded by mutex_
  const std::shared_ptr<int> source_;
  std::atomic<bool> finished_{false};
};

/// Its destructor does not wait: a dropped work goes on, and its tensors stay until it has ended.
class TorchWork final : public ::c10d::Work {
 public:
  /// `title` and `inputs`: for PyTorch's profiler.
  TorchWork(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
            std::uint64_t number, std::vector<std::shared_ptr<PendingCall>> calls, std::vector<at::Tensor> results);
  ~TorchWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Waits, releasing no lock of Python's: the caller does. After `timeout` without an end it throws, and the operation
  /// goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }
  int sourceRank() const override;
  /// Completed at once if the operation has ended, else by the communicator's thread.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::uint64_t getSequencenumber() const override { return number_; }

 private:
  /// Its error, translated, if it has ended.
  std::exception_ptr ended_error() const;

  bool done() const;
  bool wait_until(std::chrono::steady_clock::time_point until) const;
  void on_done(const comm::WorkCallback& ended) const;
  void await_peers() const;

  const std::vector<std::shared_ptr<PendingCall>> calls_;
  const std::vector<at::Tensor> results_;
  const std::uint64_t number_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  ///< null: nobody asked; guarded by future_mutex_
};

}  // namespace tessera::c10d_backend
