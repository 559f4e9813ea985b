#include "tessera/nn/context.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/attention_library.h"
#include "tessera/nn/graph_capture.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/products.h"
#include "tessera/nn/tape.h"
#include "tessera/nn/variables.h"

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

AttentionLibrary parse_attention_library(std::string_view text) {
  if (text == "auto") return AttentionLibrary::automatic;
  if (text == "cudnn") return AttentionLibrary::cudnn;
  if (text == "own") return AttentionLibrary::own;
  throw base::InvalidUsage(std::string(kAttentionVariable.name) + " is '" + std::string(text) +
                           "', needs auto, cudnn or own");
}

AttentionLibrary attention_library_of_environment() {
  return parse_attention_library(base::env_or_default(kAttentionVariable));
}

Products parse_products(std::string_view text) {
  if (text == "library") return Products::library;
  if (text == "own") return Products::own;
  throw base::InvalidUsage(std::string(kProductsVariable.name) + " is '" + std::string(text) +
                           "', needs own or library");
}

std::string_view name_of(Products products) { return products == Products::own ? "own" : "library"; }

Products products_of_environment(Products otherwise) {
  const std::optional<std::string> text = base::read_env(kProductsVariable);
  return text ? parse_products(*text) : otherwise;
}

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

PinnedBufferCache::~PinnedBufferCache() {
  for (const Block& block : blocks_) {
    block.free.wait();
    runtime_.free_host(block.data, block.bytes);
  }
}

PinnedBufferCache::Block PinnedBufferCache::acquire(std::size_t bytes) {
  const auto idle = [](const Block& block) { return block.free.done(); };
  std::erase_if(blocks_, [&](const Block& block) {
    const bool dropped = block.bytes > kKept && idle(block);
    if (dropped) {
      runtime_.wait_for_host_events();  // to free or allocate pinned memory may wait for all streams
      runtime_.free_host(block.data, block.bytes);
    }
    return dropped;
  });
  blocks_.reserve(blocks_.size() + 1);  // for the block's return
  const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                  [&](const Block& block) { return block.bytes >= bytes && idle(block); });
  if (found == blocks_.end()) {
    runtime_.wait_for_host_events();
    return {runtime_.allocate_host(bytes), bytes, {}};
  }
  Block block = std::move(*found);
  blocks_.erase(found);
  return block;
}

void upload(Context& context, void* to, std::size_t bytes, const std::function<void(void*)>& write) {
  DeviceRuntime& runtime = context.runtime();
  context.refuse_in_capture("an upload", "every replay would use the recorded data");
  if (runtime.host_accessible()) return write(to);
  if (runtime.device().type == DeviceType::meta || bytes == 0) return;
  PinnedBufferCache::Lease block(context.staging(), bytes);
  write(block->data);
  runtime.copy(context.stream(), CopyDirection::host_to_device, to, block->data, bytes);
  block->free = context.stream().record();
}

void download(Context& context, const void* from, std::size_t bytes, const std::function<void(const void*)>& read) {
  DeviceRuntime& runtime = context.runtime();
  context.refuse_in_capture("a download", "recorded work has not run yet");
  if (runtime.host_accessible()) {
    context.stream().synchronize();
    return read(from);
  }
  PinnedBufferCache::Lease block(context.staging(), bytes);
  runtime.copy(context.stream(), CopyDirection::device_to_host, block->data, from, bytes);
  context.stream().synchronize();
  read(block->data);
}

}  // namespace tessera::nn
