// A unit: modules whose parameters are gathered and reduced together, and where their memory is at each moment.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/engine/cpu_offload.h"
#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/lease.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/sharding_plan.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/optimizer.h"

namespace tessera::fsdp {

/// What the units of one engine share.
struct EngineResources {
  nn::Context& context;
  Mesh mesh;
  std::unique_ptr<Stream> gather_stream;  ///< gathers start in its order
  std::unique_ptr<Stream> reduce_stream;
  std::unique_ptr<Stream> poison_stream;  ///< null: released buffers stay as they are
  std::unique_ptr<LeasePool> parameters;  ///< unsharded
  std::unique_ptr<LeasePool> gradients;   ///< unsharded
  std::unique_ptr<LeasePool> buffers;     ///< of collective plug-ins
  std::unique_ptr<CollectivePlugin> all_gather, reduce_scatter, all_reduce;  ///< gone before their buffers
  bool exact_gathers = true;         ///< what is gathered has the bits of the parameters at rest
  bool carries_encodings = true;     ///< ... and encodings are among it; else they go as `plain` does
  std::uint64_t encodings_sent = 0;  ///< bytes, by this rank, of those that do
  TraceRecorder recorder;
  Copier copier;
  std::unique_ptr<CpuOffload> offload;  ///< null: everything is on the device
  std::int64_t offload_chunk_elements =
      0;  ///< parameters that an optimizer updates at a time where their state is with the host
  std::optional<DType> reduce_dtype;  ///< nothing: gradients are reduced in the type they have

  Stream& compute() { return context.stream(); }
  Device device() const { return context.device(); }
  /// The device's memory, from the backend where it has such: it moves its own fastest. `use` nothing: booked nowhere.
  Buffer allocate(std::size_t bytes, std::optional<MemoryCategory> use);
  /// What the compute stream does from here on comes after every copy to or from the host's shards.
  void join_offload();
  void zero(Stream& stream, void* data, std::size_t bytes) { context.runtime().fill(stream, data, 0, bytes); }
  /// All ones is NaN in every float type: who reads a buffer that was given back computes NaN, not yesterday's values.
  Event poison(const Event& released, void* data, std::size_t bytes) {
    poison_stream->wait(released);
    context.runtime().fill(*poison_stream, data, 0xFF, bytes);
    return poison_stream->record();
  }
};

/// Every verb only issues; nothing here makes the host wait.
class TESSERA_API ParamGroup {
 public:
  ParamGroup(EngineResources& fabric, UnitSpec spec, ShardingPlan plan, int optimizer_slots);
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const std::string& name() const { return spec_.name; }
  const UnitSpec& spec() const { return spec_; }
  const ShardingPlan& plan() const { return plan_; }
  bool kept_after_forward() const { return kept_after_forward_; }
  void set_kept_after_forward(bool kept) { kept_after_forward_ = kept; }
  std::int64_t elements() const;
  std::int64_t padding() const;
  std::size_t bytes() const;  ///< unsharded
  std::vector<const FlatLayout*> layouts() const;
  /// The most that it leased at a time: parameters and gradients, unsharded, in every form that they had.
  std::size_t peak_bytes() const { return peak_bytes_; }
  bool casts() const;  ///< gradients are converted for their reduction

  // Parameters.
  bool gathered() const { return state_ != State::sharded; }  ///< or on its way; always where they are replicated
  void unshard();                                             ///< no effect unless sharded
  void wait_for_unshard();  ///< after it, work on the compute stream may read the parameters
  /// No effect where they are replicated. `for_backward`: a backward follows, for which the plan may keep something.
  void reshard(bool for_backward = false);
  void settle();  ///< waits for gathers that an optimizer step started

  // Gradients.
  void prepare_gradients();  ///< memory for a backward; no effect where there is some
  /// `last`: of the step's backwards. The others' gradients are added up: what is kept of them, or all of them where
  /// nothing is reduced before the last.
  void start_reduction(bool last = true);
  bool reducing() const { return stage_ != kIdle; }
  /// Waits (on the compute stream) for the stage in flight and starts the next one, if there is one.
  void advance_reduction();

  /// From now on a step's last reduction ends with this rank's parts of the norm: an f64 for each flat parameter and
  /// n-th of it. Slots of those that it doesn't hold are left as they are.
  /// `cuts`: a rank adds what is its own along them.
  void add_norm_into(double* slots, nn::kernels::Norm norm, std::vector<ShardingPlan::AxisSlice> cuts) {
    norm_parts_ = slots;
    norm_ = norm;
    norm_cuts_ = std::move(cuts);
  }
  std::size_t norm_slots() const;
  /// Again, where gradients have been written since.
  void find_norm_parts();

  /// See Engine::for_each_gradient(); after the reductions.
  void for_each_gradient(const std::function<void(const GradientShard&)>& visit);

  /// What a collective will carry of this unit in every step.
  std::vector<TransferSpec> transfers_of(comm::OpKind collective) const;
  /// Of its trainable flat parameters, in their order.
  std::vector<Precision> precisions() const;

  // After backward.
  void update(const nn::OptimizerConfig& config, const nn::OptimizerStep& step);
  /// What the updates wrote comes before the next gathers; starts those that follow a step.
  void all_gather_updated();

  // Replicas with a period.
  void start_sync();   ///< sends how far this one has come
  void finish_sync();  ///< goes on from where all of them are to be
  void set_anchor();   ///< they are all here: from initial values, or others that are the same everywhere
  /// All that a replica has of its own, and what it will meet the others with.
  void add_replica_state(std::vector<CollectivePlugin::State>& all) const;
  void publish_replica_state();  ///< it was written
  /// Device bytes for a piece of the optimizer's offloaded state, at most.
  std::size_t piece_bytes() const;

  // Values.
  /// Initial values, from the parameters' Init; appended to the compute stream.
  void initialize(std::uint64_t seed);
  using ParameterLoader = std::function<void(const nn::Parameter& parameter, ElementRange range, float* out)>;
  /// Sets the parameters at rest, each rank its own ranges. Waits for the compute stream.
  void load(const ParameterLoader& fill, const Engine::ParameterFilter& wanted);
  /// See Engine::for_each_shard() and Engine::load_optimizer_state().
  void for_each_shard(const std::function<void(const ShardRange&)>& visit) const;
  void load_optimizer_state(const std::function<void(const nn::Parameter&, int, ElementRange, float*)>& fill,
                            const Engine::ParameterFilter& wanted);
  /// Makes download_values() work: gathers the masters, or where there are none the parameters. Collective.
  void gather_full();
  /// Shows all elements in f32, of an encoding the bytes as numbers, in the host's memory, during the call. Until
  /// close_values(). Waits.
  using Values = std::function<void(std::span<const float> values)>;
  void download_values(const nn::Parameter& parameter, const Values& show);
  void close_values();
  /// Whether parameters began or ceased to require a gradient since it was laid out.
  bool outdated() const;
  /// Lays it out anew; values stay, and the optimizer's state of what is still trained. What is trained from now on has
  /// an optimizer that begins after `steps` steps. Collective.
  void rebuild(std::uint64_t steps);
  /// See Engine::trained_since().
  std::uint64_t trained_since(const nn::Parameter& parameter) const;
  void set_trained_since(const std::function<std::uint64_t(const nn::Parameter&)>& step);
  /// Zeroes the optimizer's state. Where it lies with the host, the engine has waited for whoever used it.
  void clear_optimizer();
  /// Drops what is in flight, after an error.
  void reset();

 private:
  /// values, gradient, and state with masters: each on the device, or with the host (ShardingPlan::offloaded).
  struct FlatParameter {
    FlatLayout layout;
    Buffer values;              // at rest: this rank's part, or all where replicated
    Buffer gradient;            // kept: this rank's part, or all
    std::vector<Buffer> state;  // of the optimizer: this rank's part
    Buffer masters;             // f32, beside 16-bit values: the optimizer's part
    Buffer anchor;              // f32, with a period: where the replicas met, the optimizer's part
    Buffer outer_momentum;      // ... and the outer optimizer's state, if it has some
    Lease delta;                // between start_sync() and finish_sync()
    Buffer shown;               // all in f32, or an encoding's bytes, between gather_full and close_values
    Lease unsharded;            // parameters, between unshard and reshard
    Lease secondary;            // ... and what a plan keeps of them between forward and backward
    Lease written_gradient;     // what a backward writes, where it is converted for the reduction
    Lease full_gradient;        // between the backward and the end of the first reduction stage
    Precision precision;
    ElementRange rest, kept, optimized;
    struct UpdateRange {
      ElementRange range;  // within the flat parameter
      bool decay;
      std::uint64_t since;  // the step after which these began to be trained
    };
    std::vector<UpdateRange> runs;  // of equal weight decay, within `optimized`
    bool encoded() const { return layout.dtype == DType::u8; }
    static std::byte* at(void* base, DType dtype, std::int64_t element) {
      return static_cast<std::byte*>(base) + element * static_cast<std::int64_t>(size_of(dtype));
    }
    /// Gradients as they are reduced: kept, or in a lease of all.
    void* gradient_of(std::int64_t element) const {
      return at(gradient.data(), precision.reduce, element - kept.begin);
    }
    void* leased_gradient_of(std::int64_t element) const { return at(full_gradient.data(), precision.reduce, element); }
    void* reduced_gradient_of(std::int64_t element) const {
      return full_gradient ? leased_gradient_of(element) : gradient_of(element);
    }
    void* value_of(std::int64_t element) const { return at(values.data(), layout.dtype, element - rest.begin); }
    /// What the optimizer updates.
    float* optimized_values() const {
      return masters ? master_of(optimized.begin) : static_cast<float*>(value_of(optimized.begin));
    }
    float* master_of(std::int64_t element) const { return f32_of(masters, element - optimized.begin); }
    static float* f32_of(const Buffer& buffer, std::int64_t element) {
      return static_cast<float*>(buffer.data()) + element;
    }
    std::size_t reduced_bytes() const { return static_cast<std::size_t>(layout.padded) * size_of(precision.reduce); }
  };
  enum class State : std::uint8_t { sharded, gathering, ready };
  static constexpr std::size_t kIdle = static_cast<std::size_t>(-1);

  void lay_out();
  void note_leases();
  void allocate(FlatParameter& flat);
  void find_runs(FlatParameter& flat);
  void gather_part(FlatParameter& flat, const float* part);
  using Whole = std::map<const nn::Parameter*, std::vector<std::vector<float>>>;  // values, then each state
  Whole download_all();
  void bind_parameters(FlatParameter& flat, void* base);
  void bind_gradients(FlatParameter& flat, void* base, bool keep);
  bool reduces_in_lease() const;
  void end_writing(FlatParameter& flat);
  void add_earlier_microbatches();
  void cast_gradients(FlatParameter& flat);
  void add_gradients(const FlatParameter& flat, const void* from, void* to, std::size_t count);
  void fill_bytes(const nn::Parameter& parameter, ElementRange range, const ParameterLoader& fill, void* at);
  void widen_parameters(FlatParameter& flat);
  void gather_exactly(FlatParameter& flat);
  /// Where a gather finds or leaves a part of a flat parameter.
  struct GatherTarget {
    Lease* lease = nullptr;
    std::int64_t first = 0;  // the element that the lease begins with
    void* of(const FlatParameter& flat, std::int64_t element) const {
      return FlatParameter::at(lease->data(), flat.layout.dtype, element - first);
    }
  };
  GatherTarget gathered_to(FlatParameter& flat, std::size_t gathered);
  void lease_for_gather(FlatParameter& flat, Stream& stream);
  const void* part_to_gather(FlatParameter& flat);
  void gather(std::size_t already);
  void wait_for_gather();
  void store_gradients();
  void update_part(FlatParameter& flat, const FlatParameter::UpdateRange& part, const nn::OptimizerConfig& config,
                   const nn::OptimizerStep& step);
  nn::OptimizerRange optimizer_range(FlatParameter& flat, const FlatParameter::UpdateRange& part);
  using Produce = std::function<void(void* device)>;
  void write(bool offloaded, void* at, std::size_t bytes, const Produce& produce);
  void start_stage();
  void finish_reduction();
  comm::ReduceOp op_of(const ReduceStage& stage) const;
  void gather_updated();
  std::vector<FlatTransfer> stage_transfers(const ReduceStage& stage);
  CollectivePlugin& plugin_for(const ReduceStage& stage);

  EngineResources& fabric_;
  const UnitSpec spec_;
  const ShardingPlan plan_;
  const int slots_;                                              // of the optimizer
  std::map<const nn::Parameter*, std::uint64_t> trained_since_;  // else from the beginning
  std::vector<FlatParameter> flats_;
  bool kept_after_forward_ = false;
  State state_ = State::sharded;
  WorkChain gathers_;
  WorkChain reductions_;
  Event loaded_;            // parameters have come from the host, where no gather follows
  Event updated_;           // the optimizer has written: this unit's gather needs to wait for no other's
  Event stored_;            // what the optimizer wrote is with the host
  Event gradients_stored_;  // ... and what was reduced
  std::size_t stage_ = kIdle;
  std::vector<ElementRange> stage_input_;  // per trainable flat: what the next stage reduces
  std::size_t stages_ = 0;                 // of this backward
  bool last_ = true;                       // this backward is the step's last one
  bool has_gradients_ = false;
  std::size_t peak_bytes_ = 0;
  bool held_ = false;         // full gradients are the sum over this step's earlier microbatches
  bool accumulated_ = false;  // ... and so is what is kept of them
  double* norm_parts_ = nullptr;
  nn::kernels::Norm norm_ = nn::kernels::Norm::two;
  std::vector<ShardingPlan::AxisSlice> norm_cuts_;
};

}  // namespace tessera::fsdp
