#include "backends/nccl/abandoned_streams.h"

#include <algorithm>
#include <utility>

namespace tessera::comm::nccl {

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
