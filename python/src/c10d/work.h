// PyTorch's handle of one or several operations of the library.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Event.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/tensor_device.h"
#include "c10d/tensors.h"
#include "tessera/comm/work.h"

namespace tessera::c10d_backend {

/// Where the tensors of a call are.
struct CallDevice {
  std::shared_ptr<const TensorDevice> device;  ///< null: in host memory
  bool by_streams = false;                     ///< its operations are in the order of streams; the host waits for none
};

/// Operations in flight with what they need. Their callbacks own it together with the TorchWorks that show it, so that
/// it outlives the operations.
class PendingCall {
 public:
  PendingCall(std::vector<comm::Work> works, Holding holding, CallDevice on);

  bool done();
  /// False: not done before `until`. Throws the library's error. Later work of the calling thread's current stream sees
  /// the results: without a time limit the host does not wait for operations that are in the order of streams.
  bool wait_until(std::chrono::steady_clock::time_point until);
  /// Whether all operations have succeeded and their results are where they belong, or will be when streams get there.
  bool finished() const noexcept { return finished_.load(); }
  /// Whether it needs its tensors no more.
  bool released() const noexcept { return released_.load(); }
  const CallDevice& on() const noexcept { return on_; }
  /// The sender's rank, of a receive that has ended; null: of no receive.
  const int* source() const noexcept { return source_.get(); }
  /// Calls `ended` with the first error, or null when all results are where they belong.
  static void on_done(const std::shared_ptr<PendingCall>& call, const comm::WorkCallback& ended);

 private:
  void finish();
  void finish_on_device();
  void release() noexcept;

  std::vector<comm::Work> works_;
  const CallDevice on_;
  std::mutex mutex_;
  Holding holding_;  ///< guarded by mutex_
  const std::shared_ptr<int> source_;
  std::optional<c10::Event> valid_;  ///< the results are valid on the device; does not change once it is finished
  std::atomic<bool> finished_{false};
  std::atomic<bool> released_{false};
};

/// Waits until no callback of a future runs on a thread of its own. False: one still runs at `until`.
bool wait_for_callbacks(std::chrono::steady_clock::time_point until);

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
  /// Waits until the calling thread's current stream, or for host memory the caller, may use the results. Releases no
  /// lock of Python's: the caller does. After `timeout` without an end it throws, and the operation
  /// goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }
  int sourceRank() const override;
  /// Completed at once if the operation has ended or is in the order of streams, else by a thread of its own, so that
  /// callbacks may wait for other operations.
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
  CallDevice on() const noexcept { return calls_.empty() ? CallDevice{} : calls_.front()->on(); }

  const std::vector<std::shared_ptr<PendingCall>> calls_;
  const std::vector<at::Tensor> results_;
  const std::uint64_t number_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  ///< null: nobody asked; guarded by future_mutex_
};

}  // namespace tessera::c10d_backend
