#include "backends/shm/operation.h"

#include <algorithm>
#include <bit>

namespace tessera::comm::shm {
namespace {

/// One of so many blocks is written in the other way, to time it.
constexpr std::uint32_t kTriedOneOf = 64;

float median(std::array<float, 3> values) {
  std::ranges::sort(values);
  return values[1];
}

}  // namespace

/// How much faster streaming stores must be, since readers then need longer. A tile is read once, and soon. Other
/// memory may be read several times, also by the program; measured, a gain of 2 there was a loss in all. Cores without
/// a common cache make it 5 to 12.
float StoreChoice::needed_gain(Target target) const noexcept {
  return target == Target::tile && own_cores_ ? 1.5F : 3.0F;
}

StoreChoice::Times& StoreChoice::times_of(Target target, std::size_t operation_bytes) noexcept {
  const auto size = std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(operation_bytes)), kSizes - 1);
  return times_[static_cast<std::size_t>(target)][size];
}

bool StoreChoice::next(Target target, std::size_t operation_bytes) noexcept {
  Times& times = times_of(target, operation_bytes);
  for (const bool streams : {false, true})
    if (times.count[streams ? 1 : 0] < kKept) return streams;
  return (++times.blocks % kTriedOneOf == 0) != times.streams;
}

void StoreChoice::add(Target target, std::size_t operation_bytes, bool streams, float time) noexcept {
  Times& times = times_of(target, operation_bytes);
  const std::size_t kind = streams ? 1 : 0;
  times.last[kind][times.count[kind]++ % kKept] = time;
  if (times.count[0] < kKept || times.count[1] < kKept) return;
  times.streams = median(times.last[0]) > needed_gain(target) * median(times.last[1]);
}

}  // namespace tessera::comm::shm
