// Small things of the host that ranks tell each other: losses, times, events.
#pragma once

#include <functional>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/nn/context.h"

namespace tessera::tools {

/// A collective from `in` to `out`.
using Exchange = std::function<comm::Work(comm::ConstView in, comm::View out)>;

/// Runs it on memory of the host and waits, where the communicator takes such; nccl takes the device's only: then as
/// exchange_through_device(). `in` and `out` are the host's.
void exchange(nn::Context& context, comm::Communicator& control, comm::ConstView in, comm::View out,
              const Exchange& run);
/// The same on copies in the context's device. Waits.
void exchange_through_device(nn::Context& context, comm::ConstView in, comm::View out, const Exchange& run);

/// Everybody's numbers, as many from each, by rank.
template <class T>
std::vector<std::vector<T>> gather_all(nn::Context& context, comm::Communicator& control, const std::vector<T>& mine) {
  std::vector<T> all(mine.size() * static_cast<std::size_t>(control.size()));
  exchange(context, control, comm::view_of(mine.data(), mine.size()), comm::view_of(all.data(), all.size()),
           [&](comm::ConstView in, comm::View out) { return control.all_gather(in, out); });
  std::vector<std::vector<T>> by_rank;
  for (int r = 0; r < control.size(); ++r) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(mine.size()) * r;
    by_rank.emplace_back(first, first + static_cast<std::ptrdiff_t>(mine.size()));
  }
  return by_rank;
}

}  // namespace tessera::tools
