// The delay decorator: makes a link slower.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "plugins/decorators/decorator.h"

namespace tessera::decorators {

/// An operation is done no earlier than latency + bytes / bytes_per_second after its call, as if its data took that
/// long; meanwhile the rank computes. The bytes are those of the larger buffer. The delay never exceeds the operation's
/// deadline.
struct DelayOptions {
  std::chrono::nanoseconds latency{};
  double bytes_per_second = 0;  ///< 0: no limit
  /// With a seed, each call has a latency of its own, uniform within half and one and a half of the given one: a
  /// function of seed, rank and number of the call, not of time.
  std::optional<std::uint64_t> seed = {};
  std::optional<OpKind> only = {};  ///< other operations are not delayed
};

/// The minimum duration of call `number` of `rank`.
std::chrono::nanoseconds delay_of(const DelayOptions& options, int rank, std::uint64_t number, std::uint64_t bytes);

/// Host streams only: throws Unsupported for device streams, which would need a kernel that sleeps.
class DelayDecorator final : public Decorator {
 public:
  DelayDecorator(std::unique_ptr<Communicator> inner, DelayOptions options, std::shared_ptr<Family> family = nullptr)
      : Decorator(std::move(inner), std::move(family)), options_(options) {}

 private:
  Work do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) override;
  std::unique_ptr<Communicator> decorate_child(std::unique_ptr<Communicator> child) override;
  const DelayOptions options_;
};

}  // namespace tessera::decorators
