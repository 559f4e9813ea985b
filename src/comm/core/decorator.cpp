#include "tessera/comm/core/decorator.h"

#include <new>
#include <string>
#include <utility>

namespace tessera::comm {

Decorator::Decorator(std::unique_ptr<Communicator> inner)
    : Communicator(inner->rank(), inner->size(), {inner->timeout(), inner->logger(), inner->memory_tracker()}),
      inner_(std::move(inner)),
      capabilities_(inner_->capabilities()) {}

std::unique_ptr<Communicator> Decorator::do_split(int color, int key, const SplitOptions& options) {
  auto child = inner_->split(color, key, options);
  return child == nullptr ? nullptr : decorate(std::move(child));
}

void Decorator::do_abort(std::string_view reason) noexcept {
  try {
    inner_->abort(std::string(reason));
  } catch (const std::bad_alloc&) {
    inner_->abort({});
  }
}

void Decorator::do_traffic(TrafficStats& snapshot) const {
  const TrafficStats moved = inner_->traffic() - before_;
  for (std::size_t kind = 0; kind < kOpKinds; ++kind)
    snapshot.by_kind[kind].bytes_sent = moved.by_kind[kind].bytes_sent;
  snapshot.bytes_to_peer = moved.bytes_to_peer;
}

}  // namespace tessera::comm
