// The run-time state of a unit: modules whose parameters are unsharded and reduced together, and the memory of their
// parameters and gradients.
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

/// Resources shared by the parameter groups of one engine.
struct EngineResources {
  nn::Context& context;
  Mesh mesh;
  std::unique_ptr<Stream> gather_stream;  ///< gathers start in its order
  std::unique_ptr<Stream> reduce_stream;
  std::unique_ptr<Stream> poison_stream;  ///< null: released buffers are not poisoned
  std::unique_ptr<LeasePool> parameters;  ///< unsharded
  std::unique_ptr<LeasePool> gradients;   ///< unsharded
  std::unique_ptr<LeasePool> buffers;     ///< of collective plug-ins
  std::unique_ptr<CollectivePlugin> all_gather, reduce_scatter, all_reduce;  ///< destroyed before their buffers
  bool exact_gathers = true;         ///< gathered parameters are bitwise equal to those at rest
  bool carries_encodings = true;     ///< the plug-in also gathers encodings; otherwise `plain` does
  std::uint64_t encodings_sent = 0;  ///< bytes of encodings that this rank sent by `plain`
  TraceRecorder recorder;
  Copier copier;
  std::unique_ptr<CpuOffload> offload;      ///< null: everything is on the device
  std::int64_t offload_chunk_elements = 0;  ///< elements that the optimizer updates at a time with CPU offload
  std::optional<DType> reduce_dtype;        ///< empty: gradients are reduced in their own dtype

  Stream& compute() { return context.stream(); }
  Device device() const { return context.device(); }
  /// Allocates device memory, from the backend if it provides some, since it transfers its own memory fastest. `use`
  /// empty: not tracked.
  Buffer allocate(std::size_t bytes, std::optional<MemoryCategory> use);
  /// Makes the compute stream wait for all copies to and from offloaded shards.
  void join_offload();
  void zero(Stream& stream, void* data, std::size_t bytes) { context.runtime().fill(stream, data, 0, bytes); }
  /// All ones is NaN in every float type: computing with a released buffer yields NaN, not stale values.
  Event poison(const Event& released, void* data, std::size_t bytes) {
    poison_stream->wait(released);
    context.runtime().fill(*poison_stream, data, 0xFF, bytes);
    return poison_stream->record();
  }
};

/// The parameter group of a unit. Methods are asynchronous with respect to the host unless they say that they wait.
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
  /// The peak size of its leases: unsharded parameters and gradients, in all their forms.
  std::size_t peak_bytes() const { return peak_bytes_; }
  bool casts() const;  ///< gradients are converted for reduction

  // Parameters.
  /// unsharded, or being gathered; always true if replicated
  bool gathered() const { return state_ != State::sharded; }
  void unshard();           ///< no effect unless sharded
  void wait_for_unshard();  ///< work that follows on the compute stream may read the parameters
  /// No effect on replicated parameters. `for_backward`: a backward follows, for which the plan may keep a secondary
  /// shard.
  void reshard(bool for_backward = false);
  void settle();  ///< makes the compute stream wait for gathers that an optimizer step started

  // Gradients.
  void prepare_gradients();  ///< provides memory for a backward; no effect if there is some
  /// `last`: this is the step's last backward. Gradients of earlier backwards accumulate: the kept ones, or the full
  /// ones if nothing is reduced before the last backward.
  void start_reduction(bool last = true);
  bool reducing() const { return stage_ != kIdle; }
  /// Makes the compute stream wait for the stage in flight, and starts the next one, if any.
  void advance_reduction();

  /// Sets where a step's last reduction writes this rank's partial norms: an f64 for each flat parameter and slice (1/n
  /// of it). Slots of slices that this rank does not hold are left unchanged. `cuts`: axes over which each rank writes
  /// only its own slices.
  void add_norm_into(double* slots, nn::kernels::Norm norm, std::vector<ShardingPlan::AxisSlice> cuts) {
    norm_parts_ = slots;
    norm_ = norm;
    norm_cuts_ = std::move(cuts);
  }
  std::size_t norm_slots() const;
  /// Recomputes the partial norms after gradients were written.
  void find_norm_parts();

  /// See Engine::for_each_gradient(); after the reductions.
  void for_each_gradient(const std::function<void(const GradientShard&)>& visit);

  /// The transfers of this unit in a collective, which are the same in every step.
  std::vector<TransferSpec> transfers_of(comm::OpKind collective) const;
  /// Of its trainable flat parameters, in order.
  std::vector<Precision> precisions() const;

  // After backward.
  void update(const nn::OptimizerConfig& config, const nn::OptimizerStep& step);
  /// Orders the next gathers after the updates; starts the gathers that follow a step.
  void all_gather_updated();

  // Replicas with a sync period.
  void start_sync();   ///< sends the parameter deltas since the anchor
  void finish_sync();  ///< applies the outer optimizer
  void set_anchor();   ///< sets the anchor to the current values, which are the same on all replicas
  /// State that only this replica holds, including its anchor and outer momentum.
  void add_replica_state(std::vector<CollectivePlugin::State>& all) const;
  void publish_replica_state();  ///< call after the replica state was written
  /// Maximum device bytes for a piece of the offloaded optimizer state.
  std::size_t piece_bytes() const;

  // Values.
  /// Sets initial values from the parameters' Init; appended to the compute stream.
  void initialize(std::uint64_t seed);
  using ParameterLoader = std::function<void(const nn::Parameter& parameter, ElementRange range, float* out)>;
  /// Sets the parameters at rest, each rank its own ranges. Waits for the compute stream.
  void load(const ParameterLoader& fill, const Engine::ParameterFilter& wanted);
  /// See Engine::for_each_shard() and Engine::load_optimizer_state().
  void for_each_shard(const std::function<void(const ShardRange&)>& visit) const;
  void load_optimizer_state(const std::function<void(const nn::Parameter&, int, ElementRange, float*)>& fill,
                            const Engine::ParameterFilter& wanted);
  /// Prepares download_values(): gathers the master weights, or the parameters if there are none. Collective.
  void gather_full();
  /// Passes all elements in host memory to `show`, in f32, of an encoding the bytes as numbers; valid during the call.
  /// May be called until close_values(). Waits.
  using Values = std::function<void(std::span<const float> values)>;
  void download_values(const nn::Parameter& parameter, const Values& show);
  void close_values();
  /// Whether a parameter began or ceased to require a gradient since the layout was made.
  bool outdated() const;
  /// Rebuilds the layout. Values stay, and so does the optimizer state of parameters that remain trained. Newly trained
  /// parameters have an optimizer that begins after `steps` steps. Collective.
  void rebuild(std::uint64_t steps);
  /// See Engine::trained_since().
  std::uint64_t trained_since(const nn::Parameter& parameter) const;
  void set_trained_since(const std::function<std::uint64_t(const nn::Parameter&)>& step);
  /// Zeroes the optimizer state. If it is offloaded, the engine must have waited for all work that uses it.
  void clear_optimizer();
  /// Drops operations in flight, after an error.
  void reset();

 private:
  /// values, gradient, and state with master weights: each in device memory, or in host memory
  /// (ShardingPlan::offloaded).
  struct FlatParameter {
    FlatLayout layout;
    Buffer values;              // at rest: this rank's shard, or all where replicated
    Buffer gradient;            // kept: this rank's shard, or all
    std::vector<Buffer> state;  // optimizer state: this rank's shard
    Buffer masters;             // f32 master weights of half-precision values: the optimizer's shard
    Buffer anchor;              // f32, with a sync period: the anchor, the optimizer's shard
    Buffer outer_momentum;      // the outer optimizer's momentum, if any
    Lease delta;                // between start_sync() and finish_sync()
    Buffer shown;               // full values in f32, or an encoding's bytes, between gather_full and close_values
    Lease unsharded;            // parameters, between unshard and reshard
    Lease secondary;            // secondary shard, between forward and backward
    Lease written_gradient;     // what a backward writes, if it is converted for reduction
    Lease full_gradient;        // between the backward and the end of the first reduction stage
    Precision precision;
    ElementRange rest, kept, optimized;
    struct UpdateRange {
      ElementRange range;  // within the flat parameter
      bool decay;
      std::uint64_t since;  // step after which training of the range began
    };
    std::vector<UpdateRange> runs;  // of equal weight decay and age, within `optimized`
    bool encoded() const { return layout.dtype == DType::u8; }
    static std::byte* at(void* base, DType dtype, std::int64_t element) {
      return static_cast<std::byte*>(base) + element * static_cast<std::int64_t>(size_of(dtype));
    }
    /// Gradients in the reduce dtype: kept ones, or full ones in a lease.
    void* gradient_of(std::int64_t element) const {
      return at(gradient.data(), precision.reduce, element - kept.begin);
    }
    void* leased_gradient_of(std::int64_t element) const { return at(full_gradient.data(), precision.reduce, element); }
    void* reduced_gradient_of(std::int64_t element) const {
      return full_gradient ? leased_gradient_of(element) : gradient_of(element);
    }
    void* value_of(std::int64_t element) const { return at(values.data(), layout.dtype, element - rest.begin); }
    /// The values that the optimizer updates.
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
  using Whole = std::map<const nn::Parameter*, std::vector<std::vector<float>>>;  // values, then each optimizer state
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
  /// The input or output buffer of a gather for a flat parameter.
  struct GatherTarget {
    Lease* lease = nullptr;
    std::int64_t first = 0;  // the lease's first element
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
  std::map<const nn::Parameter*, std::uint64_t> trained_since_;  // parameters not listed: from the beginning
  std::vector<FlatParameter> flats_;
  bool kept_after_forward_ = false;
  State state_ = State::sharded;
  WorkChain gathers_;
  WorkChain reductions_;
  Event loaded_;            // parameters were uploaded from the host, if no gather follows
  Event updated_;           // the optimizer has updated this unit: its gather waits for no other unit's update
  Event stored_;            // the optimizer's results are in host memory
  Event gradients_stored_;  // the reduced gradients are in host memory
  std::size_t stage_ = kIdle;
  std::vector<ElementRange> stage_input_;  // per trainable flat parameter: input of the next stage
  std::size_t stages_ = 0;                 // of this backward
  bool last_ = true;                       // this backward is the step's last
  bool has_gradients_ = false;
  std::size_t peak_bytes_ = 0;
  bool held_ = false;         // full gradients are the sum over this step's earlier microbatches
  bool accumulated_ = false;  // kept gradients are the sum over earlier microbatches
  double* norm_parts_ = nullptr;
  nn::kernels::Norm norm_ = nn::kernels::Norm::two;
  std::vector<ShardingPlan::AxisSlice> norm_cuts_;
};

}  // namespace tessera::fsdp
