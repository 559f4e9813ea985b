// The trace decorator: reports every operation as an event.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>

#include "plugins/decorators/decorator.h"

namespace tessera::decorators {

struct OperationEvent {
  std::string operation;      ///< "all_gather", "batch", ...
  std::string label;          ///< the caller's label
  int rank = 0;               ///< in the world
  int communicator = 0;       ///< 0: the first one; then those split from it, in this rank's order
  std::uint64_t number = 0;   ///< number of the call on this rank
  std::uint64_t bytes = 0;    ///< of the larger buffer; summed over a batch's parts
  std::int64_t start_ns = 0;  ///< time of the call, on the host's clock (base::host_time_ns)
  /// When this rank first observed completion, by waiting or by polling: the operation itself may have completed
  /// earlier. If a device stream waits instead of the host: when the wait was issued (`handed_over`).
  std::int64_t end_ns = 0;
  bool handed_over = false;
  std::string error;  ///< "Timeout: all_gather #3: ...", or "" on success
};

/// Called once for each operation when it has ended, by the thread that observed its end. Must not throw.
using TraceSink = std::function<void(const OperationEvent&)>;

class TraceDecorator final : public Decorator {
 public:
  TraceDecorator(std::unique_ptr<Communicator> inner, TraceSink sink, std::shared_ptr<Family> family = nullptr)
      : Decorator(std::move(inner), std::move(family)), sink_(std::make_shared<const TraceSink>(std::move(sink))) {}

 private:
  Work do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) override;
  std::unique_ptr<Communicator> decorate_child(std::unique_ptr<Communicator> child) override;
  const std::shared_ptr<const TraceSink> sink_;
};

/// Logs "trace: all_gather #3 (block.1) 4096 bytes 125us", at level info.
TraceSink trace_to_log(std::shared_ptr<Logger> logger);

/// Collects the events and writes them as a Chrome trace (opens in Perfetto) to `path` when the last copy of the sink
/// is destroyed. Errors are then logged, if there is a logger.
TraceSink trace_to_file(std::string path, std::shared_ptr<Logger> logger);

/// Writes one process per rank, one track per communicator. Times are converted to microseconds of the host's clock.
void write_chrome_trace(std::ostream& out, std::span<const OperationEvent> events);

}  // namespace tessera::decorators
