#include "backends/nccl/operation.h"

#include "backends/nccl/stream_group.h"
#include "tessera/base/device_stream.h"

namespace tessera::comm::nccl {

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

}  // namespace tessera::comm::nccl
