#include "tessera/nn/context.h"

#include <algorithm>
#include <utility>

namespace tessera::nn {

Context::Context(ContextOptions options)
    : make_stream_(options.make_stream ? std::move(options.make_stream) : make_immediate_stream),
      memory_(options.ledger ? std::move(options.ledger) : std::make_shared<Ledger>(), options.memory),
      stream_(make_stream_()),
      threads_(std::make_unique<ThreadPool>(static_cast<std::size_t>(std::max(options.threads, 0)))) {}

Context::~Context() = default;

std::unique_ptr<Stream> Context::make_stream() const { return make_stream_(); }

TapeScope::TapeScope(Context& context, Tape* tape) : context_(context), previous_(std::exchange(context.tape_, tape)) {}
TapeScope::~TapeScope() { context_.tape_ = previous_; }

}  // namespace tessera::nn
