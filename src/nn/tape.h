// The tape: records operations in order so that backward can run them in reverse.
//
// The reverse of the recording order is a valid backward order, so no graph has to be sorted. Each node is destroyed as
// soon as it has run, together with the activations that it saved. The tape also records module boundaries, at which it
// calls the hooks of a module's backward.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/base/module_tree.h"
#include "tessera/nn/gradient.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn {

class Module;

/// Used by one thread. Tapes nest: a checkpointed region records its recomputation on its own tape.
class TESSERA_API Tape {
 public:
  /// What becomes of recorded operations.
  enum class RecordMode : std::uint8_t {
    nodes,   ///< records
    nothing  ///< marks outputs that require a gradient, as recording does, but drops every node
  };
  /// `phase`: passed to the hooks of the forwards that the tape records.
  explicit Tape(Phase phase = Phase::forward, RecordMode keep = RecordMode::nodes) : phase_(phase), keep_(keep) {}
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  /// Records that `output` was computed. `backward` is called when output's gradient is complete. It captures handles
  /// of the tensors that it reads (for parameters only the handle, resolved when it runs), output's gradient() and the
  /// gradient() of each input that it writes.
  void record(std::string_view op, const Tensor& output, std::function<void()> backward);

  /// Records that a call of `module` begins; backward() calls notify_backward_ends() there.
  void enter(Module& module);
  /// Records that a call of `module` ends; backward() calls notify_backward_begins() there.
  void leave(Module& module);

  /// Computes the gradients of everything that requires one, starting with d(loss)/d(loss) = `seed`. Empties the tape,
  /// also if it throws.
  void backward(const Tensor& loss, double seed = 1.0);
  /// Like backward(), but starts from gradients that the caller wrote. Empties the tape, also if it throws.
  void backward_from_gradients();
  void clear();                                       ///< drops all nodes and the activations that they saved
  Phase phase() const { return phase_; }              ///< phase given to the constructor
  std::size_t size() const { return nodes_.size(); }  ///< number of recorded nodes, module boundaries included

 private:
  enum class Kind : std::uint8_t { operation, enter, leave };
  struct Node {
    Kind kind = Kind::operation;
    std::string_view op;  // a string literal
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

/// Returns the tape to record on, or null if there is none or no input requires a gradient. Marks `output` as requiring
/// a gradient if it returns a tape.
TESSERA_API Tape* recording(std::initializer_list<Tensor> inputs, Tensor& output);

}  // namespace tessera::nn
