// What other programs do on this host.
#pragma once

#include <optional>

namespace tessera::tools {

/// Compares the time that this host's cores were busy with that of this program and of the processes that it has
/// started and waited for.
class HostLoad {
 public:
  HostLoad();  ///< starts to count

  /// What other programs used of the cores' time since then, from 0 to 100; nothing where the system doesn't say.
  std::optional<double> others_percent() const;

 private:
  struct Ticks {
    double all = 0, busy = 0, own = 0;
  };
  static std::optional<Ticks> now();
  std::optional<Ticks> start_;
};

}  // namespace tessera::tools
