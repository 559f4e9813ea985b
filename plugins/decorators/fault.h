// Something goes wrong, at one call of one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "plugins/decorators/decorator.h"

namespace tessera::decorators {

enum class FaultKind : std::uint8_t {
  drop,     ///< the call never reaches the others; waiting for it ends with Timeout at its deadline, as theirs does
  kill,     ///< this process kills itself (SIGKILL) instead
  corrupt,  ///< one bit of the result is the other one; of what is sent where the call has no result on this rank
};

struct FaultOptions {
  FaultKind kind = FaultKind::drop;
  std::uint64_t call = 1;        ///< which of the rank's calls; counted as Decorator says
  std::optional<int> rank = {};  ///< of the world; none: every rank
};

/// Memory must be the host's to be corrupted: Unsupported is thrown at the call. A call without any element can't be
/// corrupted: InvalidUsage.
class FaultDecorator final : public Decorator {
 public:
  FaultDecorator(std::unique_ptr<Communicator> inner, FaultOptions options, std::shared_ptr<Family> family = nullptr);

  struct AbortFlag;  ///< ends the waiting for dropped calls

 private:
  Work do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) override;
  std::unique_ptr<Communicator> decorate_child(std::unique_ptr<Communicator> child) override;
  void do_abort(std::string_view reason) noexcept override;
  Work corrupt(std::span<const OpDesc> calls, bool batch, std::uint64_t number);

  const FaultOptions options_;
  const std::shared_ptr<AbortFlag> stop_;
};

}  // namespace tessera::decorators
