// Records the work of a context in order to run it again as one graph of its device.
#pragma once

#include <memory>

#include "tessera/nn/context.h"

namespace tessera::nn {

/// During its lifetime, work submitted to the compute stream is recorded instead of run, and memory comes from
/// `memory`. The graph uses the same addresses, so they must not be allocated for anything else while the graph exists.
/// During capture the host can neither write nor read tensors, and dropout throws because its masks change.
class TESSERA_API GraphCapture {
 public:
  /// `context` and `memory` must outlive the capture. Throws Unsupported if the device has no graphs.
  GraphCapture(Context& context, MemoryPool& memory);
  ~GraphCapture();  ///< discards an unfinished capture
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;

  /// Ends the capture and returns its graph. Throws what DeviceRuntime::end_capture() throws. Once.
  std::unique_ptr<base::Graph> finish();

 private:
  void end() noexcept;
  Context& context_;
  MemoryPool& memory_;
  bool open_ = true;
};

}  // namespace tessera::nn
