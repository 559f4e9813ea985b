#include "tessera/nn/capture.h"

namespace tessera::nn {

Capture::Capture(Context& context, MemoryPool& memory) : context_(context), memory_(memory) {
  context_.runtime().begin_capture(context_.stream());
  context_.memory().swap(memory_);
  context_.capturing_ = true;
}

void Capture::end() noexcept {
  open_ = false;
  context_.capturing_ = false;
  context_.memory().swap(memory_);
}

Capture::~Capture() {
  if (!open_) return;
  end();
  try {
    context_.runtime().end_capture(context_.stream());
  } catch (const std::exception&) {  // the first error is on its way already
  }
}

std::unique_ptr<base::Graph> Capture::finish() {
  end();
  return context_.runtime().end_capture(context_.stream());
}

}  // namespace tessera::nn
