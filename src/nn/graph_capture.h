// Recording what a context computes, to run it again as one graph of its device.
#pragma once

#include <memory>

#include "tessera/nn/context.h"

namespace tessera::nn {

/// While it lives, what goes to the compute stream is recorded instead of run, and memory comes from `memory`: the
/// graph will use the same addresses, so nobody else may get them while it lives. The host can neither write nor read
/// tensors meanwhile, and dropout is refused, since its masks change.
class TESSERA_API GraphCapture {
 public:
  /// Both outlive it. Throws Unsupported where the device has no graphs.
  GraphCapture(Context& context, MemoryPool& memory);
  ~GraphCapture();  ///< what was not finished is dropped
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;

  std::unique_ptr<base::Graph> finish();

 private:
  void end() noexcept;
  Context& context_;
  MemoryPool& memory_;
  bool open_ = true;
};

}  // namespace tessera::nn
