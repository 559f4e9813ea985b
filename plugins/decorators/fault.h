// The fault decorator: injects a fault at one call of one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "plugins/decorators/decorator.h"

namespace tessera::decorators {

enum class FaultKind : std::uint8_t {
  drop,     ///< the call never reaches other ranks; waits for it end with Timeout at its deadline, as on those ranks
  kill,     ///< this process kills itself (SIGKILL) instead
  corrupt,  ///< one bit of the result is flipped; of the sent data if the call has no result on this rank
};

struct FaultOptions {
  FaultKind kind = FaultKind::drop;
  std::uint64_t call = 1;        ///< number of the rank's call, counted as in Decorator
  std::optional<int> rank = {};  ///< global rank; empty: every rank
};

/// Corruption requires host memory: the call throws Unsupported for other memory, and InvalidUsage if it has no
/// elements.
class FaultDecorator final : public Decorator {
 public:
  FaultDecorator(std::unique_ptr<Communicator> inner, FaultOptions options, std::shared_ptr<Family> family = nullptr);

  struct AbortFlag;  ///< ends waits for dropped calls

 private:
  Work do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) override;
  std::unique_ptr<Communicator> decorate_child(std::unique_ptr<Communicator> child) override;
  void do_abort(std::string_view reason) noexcept override;
  Work corrupt(std::span<const OpDesc> calls, bool batch, std::uint64_t number);

  const FaultOptions options_;
  const std::shared_ptr<AbortFlag> stop_;
};

}  // namespace tessera::decorators
