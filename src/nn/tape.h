// The tape: what was computed, in order, so that it can be walked backwards.
//
// Reverse order of recording is a valid order of backward, so there is no graph to sort. Each node is dropped as soon
// as it has run, and with it the activations that it saved. Module borders are on the tape too: that is how hooks learn
// that the backward of a module begins and ends.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/nn/gradient.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn {

class Module;

/// In which walk a hook was called.
enum class Phase : std::uint8_t { forward, recompute, backward };

/// Used by one thread. Tapes nest: a checkpointed region records its recomputation on a tape of its own.
class TESSERA_API Tape {
 public:
  /// `nothing`: marks what requires a gradient, as recording does, and drops every node.
  enum class RecordMode : std::uint8_t { nodes, nothing };
  /// `phase`: what hooks are told of the forwards that it records.
  explicit Tape(Phase phase = Phase::forward, RecordMode keep = RecordMode::nodes) : phase_(phase), keep_(keep) {}
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  /// Records that `output` was computed. `backward` is called when output's gradient is complete; it captures handles
  /// of what it reads (parameters: the handle, resolved only then), output's gradient() and the gradient() of each
  /// input that it writes.
  void record(std::string_view op, const Tensor& output, std::function<void()> backward);

  void enter(Module& module);
  void leave(Module& module);

  /// Gradients of everything that requires one, beginning with d(loss)/d(loss) = `seed`. Empties the tape, also when it
  /// throws.
  void backward(const Tensor& loss, double seed = 1.0);
  /// The same, of everything whose gradient was written by others. Empties the tape, also when it throws.
  void backward_from_gradients();
  void clear();
  Phase phase() const { return phase_; }
  std::size_t size() const { return nodes_.size(); }

 private:
  enum class Kind : std::uint8_t { operation, enter, leave };
  struct Node {
    Kind kind = Kind::operation;
    std::string_view op;  // a literal
    std::shared_ptr<Gradient> output;
    std::function<void()> backward;
    Module* module = nullptr;
  };
  struct ClearOnExit;
  void run(Node& node);
  void add(Node node);
  const Phase phase_;
  const RecordMode keep_;
  std::vector<Node> nodes_;
};

/// The tape to record on, or null: there is one, and one of the inputs requires a gradient. Marks `output` as requiring
/// one.
TESSERA_API Tape* recording(std::initializer_list<Tensor> inputs, Tensor& output);

}  // namespace tessera::nn
