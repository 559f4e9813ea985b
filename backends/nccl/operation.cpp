#include "backends/nccl/operation.h"

#include <algorithm>
#include <utility>

#include "backends/nccl/stream_group.h"
#include "tessera/base/device_stream.h"

namespace tessera::comm::nccl {

OperationStream::OperationStream(const NcclApi& api, std::size_t scratch_bytes)
    : api_(api), scratch_(api, scratch_bytes), stream_(api), end_(api), before_(api) {
  check_cuda(api, api.cudaMemsetAsync(scratch_.device(), 0, scratch_bytes, stream_.get()), "cudaMemsetAsync");
}

void* OperationStream::workspace(std::size_t bytes) {
  const std::size_t now = workspaces_.empty() ? 0 : workspaces_.back()->bytes();
  if (workspaces_.empty() || now < bytes)
    workspaces_.push_back(std::make_unique<DeviceBlock>(api_, std::max(bytes, 2 * now)));
  return workspaces_.back()->data();
}

void OperationStream::come_after(cudaStream_t stream) {
  before_.record(stream);
  comes_after_ = true;
}

void OperationStream::record_end() noexcept {
  if (api_.cudaEventRecord(end_.get(), stream_.get()) != cudaSuccess) api_.cudaGetLastError();  // end() will tell
}

void OperationStream::begin_operation() {
  if (comes_after_) before_.make_stream_wait(stream_.get());
  comes_after_ = false;
}

void NcclOperation::reset(const OpDesc& what, std::uint64_t number, std::string_view title) {
  Operation::reset(what, number);
  start_deadline();
  label_ = what.label;
  call.label = label_;
  in_counts_.assign(what.in_counts.begin(), what.in_counts.end());
  out_counts_.assign(what.out_counts.begin(), what.out_counts.end());
  call.in_counts = in_counts_;
  call.out_counts = out_counts_;
  title_ = title;
  recorded = false;
  signature.clear();
}

void NcclOperation::wait_on(Stream& stream) {
  auto* const device = dynamic_cast<DeviceStream*>(&stream);
  if (device == nullptr) return WorkState::wait_on(stream);
  if (state.load() == failed) nccl_.throw_failure(*this);
  const DeviceGuard guard(nccl_.runtime().api(), device->device().index);  // as in NcclCommunicator::do_after()
  event.make_stream_wait(static_cast<cudaStream_t>(device->native()));
}

std::string NcclOperation::format() const {
  if (title_.empty()) return Operation::format();
  std::string text(title_);
  if (sequence != 0) text += " #" + std::to_string(sequence);
  return label_.empty() ? text : text + " (" + label_ + ")";
}

AbandonedStreams::~AbandonedStreams() {
  if (abandoned_.empty()) return;
  // Never destroyed, since that would free what the streams use.
  static auto* const kLeaked = new std::vector<std::shared_ptr<OperationStream>>;
  static std::mutex leaked_mutex;
  const std::lock_guard lock(leaked_mutex);
  for (auto* streams : {&abandoned_, &kept_})
    kLeaked->insert(kLeaked->end(), std::make_move_iterator(streams->begin()), std::make_move_iterator(streams->end()));
}

void AbandonedStreams::add(std::shared_ptr<OperationStream> stream, bool for_good) noexcept {
  {
    const std::lock_guard lock(mutex_);
    for_good_ = for_good_ || for_good;
    if (std::ranges::find(abandoned_, stream) != abandoned_.end()) return;
    abandoned_.push_back(std::move(stream));
  }
  if (logger_ != nullptr)
    logger_->write(LogLevel::warn,
                   "nccl: a stream has not ended after an abort: what it may use is leaked, since a free would wait "
                   "for the device");
}

void AbandonedStreams::keep(std::shared_ptr<OperationStream> stream) noexcept {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(stream));
}

bool AbandonedStreams::any() noexcept {
  const std::lock_guard lock(mutex_);
  return any_locked();
}

bool AbandonedStreams::any_locked() noexcept {
  if (abandoned_.empty()) return false;
  cudaError_t error = cudaSuccess;
  const auto ended = [&](const auto& stream) { return stream->end().reached(error); };
  if (for_good_ || !std::ranges::all_of(abandoned_, ended)) return true;
  abandoned_.clear();
  kept_.clear();
  return false;
}

}  // namespace tessera::comm::nccl
