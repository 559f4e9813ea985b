#include "c10d/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "c10d/errors.h"
#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/thread.h"

namespace tessera::c10d_backend {

using Clock = std::chrono::steady_clock;

namespace {

/// Calls `ended` after `parts` calls of the result, with the first error among them.
comm::WorkCallback after_all(std::size_t parts, const comm::WorkCallback& ended) {
  struct Countdown {
    std::mutex mutex;
    std::size_t left;          // guarded by mutex
    std::exception_ptr error;  // guarded by mutex
  };
  auto state = std::make_shared<Countdown>();
  state->left = parts;
  return [state = std::move(state), ended](const std::exception_ptr& error) {
    {
      const std::lock_guard lock(state->mutex);
      if (state->error == nullptr) state->error = error;
      if (--state->left != 0) return;
    }
    ended(state->error);
  };
}

/// The value is valid on the streams that wait for the one that is current in this call. `device`: null for host
/// memory.
void complete(c10::ivalue::Future& future, const std::vector<at::Tensor>& results, const TensorDevice* device,
              const std::exception_ptr& error) {
  std::optional<c10::StreamGuard> guard;
  if (device != nullptr) guard.emplace(device->results());
  if (error != nullptr)
    future.setError(error);
  else
    future.markCompleted(c10::IValue(results));
}

/// The callbacks that run on threads of their own.
struct RunningCallbacks {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t count = 0;  // guarded by mutex
};

RunningCallbacks& running_callbacks() {
  static auto* const all = new RunningCallbacks;  // never destroyed: a callback may outlive the program's end
  return *all;
}

/// Runs `callback` on a new thread: it may wait for another operation, which the calling communicator's thread carries
/// on. Python's callbacks do so, such as those of DDP's hooks.
void run_on_own_thread(std::function<void()> callback) {
  RunningCallbacks& all = running_callbacks();
  {
    const std::lock_guard lock(all.mutex);
    ++all.count;
  }
  const auto run = [callback = std::move(callback), &all]() mutable {
    try {
      callback();
    } catch (const std::exception& error) {
      TORCH_WARN("tessera: a callback of a future failed: ", error.what());
    }
    callback = nullptr;  // what it holds may need Python
    const std::lock_guard lock(all.mutex);
    --all.count;
    all.changed.notify_all();
  };
  try {
    base::start_thread(run).detach();
  } catch (const base::SystemError&) {  // no more threads: then it must not wait
    auto here = run;
    here();
  }
}

}  // namespace

bool wait_for_callbacks(Clock::time_point until) {
  RunningCallbacks& all = running_callbacks();
  std::unique_lock lock(all.mutex);
  return all.changed.wait_until(lock, until, [&] { return all.count == 0; });
}

PendingCall::PendingCall(std::vector<comm::Work> works, Holding holding, CallDevice on)
    : works_(std::move(works)), on_(std::move(on)), holding_(std::move(holding)), source_(holding_.source) {
  if (!on_.by_streams) return;
  const auto results = on_.device->borrow(on_.device->results());
  for (comm::Work& work : works_) work.wait_on(*results);
  finish();
}

bool PendingCall::done() {
  for (comm::Work& work : works_)
    if (!work.done()) return false;
  return !finished() || !valid_ || valid_->query();
}

bool PendingCall::wait_until(Clock::time_point until) {
  const bool limited = until != Clock::time_point::max();
  for (comm::Work& work : works_) {
    if (on_.by_streams && !limited && !work.done()) continue;
    if (!limited)
      work.wait();
    else if (!work.wait_until(until))
      return false;
  }
  finish();
  if (valid_) valid_->block(on_.device->current());
  release();  // what uses this memory next comes after the results, in the order of the program's stream
  return true;
}

void PendingCall::finish() {
  if (finished()) return;
  const std::lock_guard lock(mutex_);
  if (finished()) return;
  if (on_.device != nullptr)
    finish_on_device();
  else
    for (const auto& step : holding_.at_end) step();
  finished_.store(true);
}

/// The results get to their places on a stream of their own, which the program's streams then wait for.
void PendingCall::finish_on_device() {
  const c10::Stream results = on_.device->results();
  if (!on_.by_streams && holding_.at_end.empty()) return;  // they are there
  const c10::StreamGuard guard(results);
  if (!holding_.at_end.empty()) {
    const c10::impl::VirtualGuardImpl device(results.device_type());
    for (const at::Tensor& tensor : holding_.tensors)
      device.recordDataPtrOnStream(tensor.storage().data_ptr(), results);
    for (const auto& step : holding_.at_end) step();
  }
  valid_.emplace(results.device_type());
  valid_->record(results);
}

void PendingCall::release() noexcept {
  if (released()) return;
  const std::lock_guard lock(mutex_);
  holding_ = {};
  released_.store(true);
}

void PendingCall::on_done(const std::shared_ptr<PendingCall>& call, const comm::WorkCallback& ended) {
  // One part more than there are operations: none may be the last one before all were asked.
  const comm::WorkCallback part = after_all(call->works_.size() + 1, [call, ended](std::exception_ptr error) {
    try {
      if (error == nullptr) call->finish();
      call->release();
    } catch (...) {
      error = std::current_exception();
    }
    ended(error);
  });
  for (comm::Work& work : call->works_) work.on_done(part);
  part(nullptr);
}

TorchWork::TorchWork(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                     std::uint64_t number, std::vector<std::shared_ptr<PendingCall>> calls,
                     std::vector<at::Tensor> results)
    : Work(rank, type, title, inputs), calls_(std::move(calls)), results_(std::move(results)), number_(number) {}

TorchWork::~TorchWork() {
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  try {
    for (const auto& call : calls_)
      if (!call->released() && (future_ == nullptr || call->on().by_streams))
        PendingCall::on_done(call, [](const std::exception_ptr&) {});
  } catch (...) {  // no memory for a callback: then the destructor of its operations waits
  }
}

bool TorchWork::done() const {
  return std::all_of(calls_.begin(), calls_.end(), [](const auto& call) { return call->done(); });
}

bool TorchWork::wait_until(Clock::time_point until) const {
  return std::all_of(calls_.begin(), calls_.end(), [&](const auto& call) { return call->wait_until(until); });
}

void TorchWork::on_done(const comm::WorkCallback& ended) const {
  const comm::WorkCallback part = after_all(calls_.size() + 1, ended);
  for (const auto& call : calls_) PendingCall::on_done(call, part);
  part(nullptr);
}

bool TorchWork::isCompleted() {
  if (!done()) return false;
  ended_error();  // its results are where they belong, on a device once its stream gets there
  return done();
}

std::exception_ptr TorchWork::ended_error() const {
  try {
    if (done()) wait_until(Clock::time_point::max());
    return nullptr;
  } catch (...) {
    return as_torch_error(std::current_exception());
  }
}

int TorchWork::sourceRank() const {
  const int* const source = calls_.size() == 1 ? calls_.front()->source() : nullptr;
  return source != nullptr ? *source : Work::sourceRank();  // which throws
}

bool TorchWork::isSuccess() const { return done() && ended_error() == nullptr; }

std::exception_ptr TorchWork::exception() const { return ended_error(); }

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  with_torch_errors([&] {
    const auto until = timeout <= kNoTimeout ? Clock::time_point::max() : base::deadline_after(timeout);
    if (!wait_until(until))
      C10_THROW_ERROR(DistBackendError, "tessera: " + ::c10d::opTypeToString(retrieveOpType()) + " #" +
                                            std::to_string(number_) + " has not ended within the " +
                                            std::to_string(timeout.count()) + " ms of wait(); it is still under way");
  });
  if (const auto end = std::exchange(recordFunctionEndCallback_, nullptr)) end();  // of the profiler's event
  return true;
}

/// The peers of a small operation mostly call it within microseconds. To be called back by another thread takes longer.
void TorchWork::await_peers() const {
  constexpr std::size_t kSmall = 64 * 1024;
  constexpr auto kBriefly = std::chrono::microseconds(50);
  std::size_t bytes = 0;
  for (const at::Tensor& result : results_)
    if (result.layout() == at::kStrided) bytes += result.nbytes();  // sparse tensors have been waited for
  if (bytes > kSmall) return;
  for (const auto until = Clock::now() + kBriefly; !done() && Clock::now() < until;) std::this_thread::yield();
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (future_ != nullptr) return future_;
  const CallDevice device = on();
  if (!device.by_streams) await_peers();
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::ofTensors(),
      device.device != nullptr ? std::vector{device.device->device()} : std::vector<c10::Device>{});
  if (device.by_streams)
    complete(*future_, results_, device.device.get(), nullptr);
  else if (done())
    complete(*future_, results_, device.device.get(), ended_error());
  else
    on_done([future = future_, results = results_, on = device.device](const std::exception_ptr& error) {
      run_on_own_thread([=] { complete(*future, results, on.get(), as_torch_error(error)); });
    });
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFutureResult() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  getFuture()->addCallback([future](c10::ivalue::Future& ended) {
    const auto result = ended.hasError() ? ::c10d::WorkResult::COMM_ERROR : ::c10d::WorkResult::SUCCESS;
    future->markCompleted(c10::IValue(static_cast<std::int64_t>(result)));
  });
  return future;
}

}  // namespace tessera::c10d_backend
