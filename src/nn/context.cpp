#include "tessera/nn/context.h"

#include <algorithm>
#include <utility>

#include "tessera/nn/attention_library.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/tape.h"

namespace tessera::nn {

Context::Context(ContextOptions options)
    : runtime_(options.runtime ? std::move(options.runtime) : open_device(options.device)),
      make_stream_(options.make_stream ? std::move(options.make_stream)
                                       : [runtime = runtime_] { return runtime->make_stream(); }),
      memory_(options.memory_tracker ? std::move(options.memory_tracker) : std::make_shared<MemoryTracker>(),
              options.memory, runtime_),
      stream_(make_stream_()),
      threads_(std::make_unique<ThreadPool>(static_cast<std::size_t>(std::max(options.threads, 0)))),
      kernels_(make_kernels({*runtime_, memory_, *threads_, std::move(options.logger), options.planned,
                             options.products ? *options.products : products_of_environment()})),
      row_multiple_(options.row_multiple > 0 ? options.row_multiple : kernels_->row_multiple()),
      staging_(std::make_unique<PinnedBufferCache>(*runtime_)) {
  attention_library_of_environment();  // a value that can't be read is refused where it has no effect, too
}

Context::~Context() = default;

std::unique_ptr<Stream> Context::make_stream() const { return make_stream_(); }

void Context::refuse_in_capture(std::string_view what, std::string_view why) const {
  if (capturing_) throw InvalidUsage(std::string(what) + " can't be part of a graph: " + std::string(why));
}

void Context::throw_unsupported(std::string_view op, DType dtype) const {
  throw Unsupported(std::string(op) + ": no kernel for " + std::string(name_of(dtype)) + " on " + name_of(device()));
}

TapeScope::TapeScope(Context& context)
    : own_(std::make_unique<Tape>()), context_(context), previous_(std::exchange(context.tape_, own_.get())) {}
TapeScope::TapeScope(Context& context, Tape* tape) : context_(context), previous_(std::exchange(context.tape_, tape)) {}
TapeScope::~TapeScope() { context_.tape_ = previous_; }

ForwardStateScope::ForwardStateScope(Context& context, const ForwardState& state)
    : context_(context), previous_(context.forward_state()) {
  context_.random_ = state.random;
  context_.training_ = state.training;
}

ForwardStateScope::~ForwardStateScope() {
  context_.random_ = previous_.random;
  context_.training_ = previous_.training;
}

}  // namespace tessera::nn
