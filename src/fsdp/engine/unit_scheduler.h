// The order of a step's operations: hooks in the model's modules that unshard, reshard and reduce its units.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/fsdp/engine/engine_core.h"

namespace tessera::fsdp {

/// One per engine; used by its thread. While it exists, forwards and backwards of the model run its hooks.
class TESSERA_API UnitScheduler {
 public:
  /// Installs the hooks. `core` outlives the scheduler. Throws InvalidUsage if the prefetch order names unknown units.
  explicit UnitScheduler(EngineCore& core);
  ~UnitScheduler();
  UnitScheduler(const UnitScheduler&) = delete;
  UnitScheduler& operator=(const UnitScheduler&) = delete;

  /// The gradients of this step's microbatches: none -> partial after a backward that is not the last one, -> complete
  /// after the last backward, -> none in begin_update() or abort_step().
  enum class Gradients : std::uint8_t { none, partial, complete };
  Gradients gradients() const { return gradients_; }

  void set_is_last_backward(bool last) { last_backward_ = last; }
  /// Waits, on the compute stream, for the reductions in flight.
  void finish_reductions();
  /// Ends the forwards and backwards of a step: its gradients are used up. Throws InvalidUsage unless they are
  /// complete.
  void begin_update();
  /// A replayed graph has done what a last backward of the whole model does.
  void on_replayed() { gradients_ = Gradients::complete; }
  /// The layout of units has changed: the ranks compare their order again.
  void on_layout_changed() { orders_compared_ = false; }
  /// Drops an incomplete step, after an error.
  void abort_step();

 private:
  struct UnitProgress {
    int uses = 0;             // forwards recorded on the tape whose backward has not ended
    std::size_t entered = 0;  // modules of the unit entered in this forward
    bool reduced = false;     // in this backward
    std::vector<TraceRecorder::Span> spans;
  };
  using UnitLists = std::vector<std::vector<std::size_t>>;  // by unit
  UnitLists resolve(const std::map<std::string, std::vector<std::string>>& names) const;
  std::size_t unit_named(const std::string& name) const;
  void install_hooks();

  void pre_forward(std::size_t index, Phase phase);
  void post_forward(std::size_t index, bool is_model, Phase phase);
  void pre_backward(std::size_t index);
  void post_backward(std::size_t index);
  void end_root_forward(Phase phase);
  void end_root_backward();

  void unshard(std::size_t index);
  void prefetch(std::size_t index, int direction, Phase phase);
  bool prefetch_unit(std::size_t index, Phase phase);
  bool within_limits(const ParamGroup& group) const;
  void reshard_recomputed(std::size_t except);
  void reshard_after_backward(std::size_t index);
  void start_reduction(std::size_t index);
  void advance_reductions();
  void synchronize_buffers(Phase phase);

  EngineCore& core_;
  const UnitLists prefetch_forward_, prefetch_backward_;  // as the program listed them
  std::vector<UnitProgress> progress_;
  std::vector<std::size_t> reducing_;    // oldest first
  std::vector<std::size_t> recomputed_;  // recomputed units whose backward has not begun
  Gradients gradients_ = Gradients::none;
  bool last_backward_ = true;
  bool orders_compared_ = false;       // the ranks have compared the first forward's order
  bool buffers_synchronized_ = false;  // in this step
};

}  // namespace tessera::fsdp
