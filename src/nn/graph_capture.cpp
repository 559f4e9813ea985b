#include "tessera/nn/graph_capture.h"

namespace tessera::nn {

GraphCapture::GraphCapture(Context& context, MemoryPool& memory) : context_(context), memory_(memory) {
  context_.runtime().begin_capture(context_.stream());
  context_.memory().swap(memory_);
  context_.capturing_ = true;
}

void GraphCapture::end() noexcept {
  open_ = false;
  context_.capturing_ = false;
  context_.memory().swap(memory_);
}

GraphCapture::~GraphCapture() {
  if (!open_) return;
  end();
  try {
    context_.runtime().end_capture(context_.stream());
  } catch (const std::exception&) {  // the first error is already propagating
  }
}

std::unique_ptr<base::Graph> GraphCapture::finish() {
  end();
  return context_.runtime().end_capture(context_.stream());
}

}  // namespace tessera::nn
