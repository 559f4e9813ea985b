// What the operations of one rank run on: memory, a stream, threads, and the tape that records them.
#pragma once

#include <functional>
#include <memory>

#include "tessera/nn/thread_pool.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

class Tape;

/// What a dropout mask depends on besides its module and element (DESIGN: same masks for every world size).
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::int64_t first_sample = 0;  ///< global index of the batch's first sequence
};

struct ContextOptions {
  int threads = 1;
  std::shared_ptr<Ledger> ledger;  ///< null: one of its own
  MemoryPoolOptions memory;
  std::function<std::unique_ptr<Stream>()> make_stream;  ///< null: immediate streams
};

/// One per rank; used by one thread. Outlives every tensor made on it.
class TESSERA_API Context {
 public:
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  MemoryPool& memory() { return memory_; }
  Ledger& ledger() { return memory_.ledger(); }
  Stream& stream() { return *stream_; }  ///< the compute stream
  std::unique_ptr<Stream> make_stream() const;
  ThreadPool& threads() { return *threads_; }
  RandomState& random() { return random_; }

  /// False: dropout does nothing (evaluation).
  bool training() const { return training_; }
  void set_training(bool training) { training_ = training; }

  /// The tape that records operations now; null: nothing is recorded.
  Tape* tape() const { return tape_; }

 private:
  friend class TapeScope;
  std::function<std::unique_ptr<Stream>()> make_stream_;
  MemoryPool memory_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ThreadPool> threads_;
  RandomState random_;
  Tape* tape_ = nullptr;
  bool training_ = true;
};

/// Makes `tape` (null: none) the recording one for as long as it lives. Scopes nest.
class TESSERA_API TapeScope {
 public:
  TapeScope(Context& context, Tape* tape);
  ~TapeScope();
  TapeScope(const TapeScope&) = delete;
  TapeScope& operator=(const TapeScope&) = delete;

 private:
  Context& context_;
  Tape* const previous_;
};

/// Turns training off for as long as it lives: no dropout.
class TESSERA_API EvaluationScope {
 public:
  explicit EvaluationScope(Context& context) : context_(context), previous_(context.training()) {
    context.set_training(false);
  }
  ~EvaluationScope() { context_.set_training(previous_); }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  Context& context_;
  const bool previous_;
};

}  // namespace tessera::nn
