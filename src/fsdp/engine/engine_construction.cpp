// Construction of an engine: option checks, units and their shared resources, hooks. And its destruction.
#include <algorithm>
#include <exception>

#include "tessera/base/error.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/engine/exec_order_validator.h"
#include "tessera/fsdp/engine/module_buffers.h"
#include "tessera/fsdp/engine/param_group.h"

namespace tessera::fsdp {

namespace {

void require_offload(const base::DeviceRuntime& runtime) {
  if (runtime.device().type == base::DeviceType::meta)
    throw InvalidUsage("cpu offload: device meta has shapes without data, so there is nothing to move; leave it out");
  if (runtime.host_accessible())
    throw InvalidUsage("cpu offload: device " + base::name_of(runtime.device()) +
                       " computes in the host's memory, so there is nothing to gain; leave it out");
}

/// Checks what can be checked before ranks communicate, and sets the mesh.
EngineOptions checked(EngineOptions options, int ranks) {
  if (options.limit_all_gathers < 0)
    throw InvalidUsage("limit_all_gathers: " + std::to_string(options.limit_all_gathers) +
                       " units; 0 (no limit) or more");
  if (options.prefetch < 0) throw InvalidUsage("prefetch: " + std::to_string(options.prefetch) + " units; 0 or more");
  if (options.clip_norm < 0)
    throw InvalidUsage("clip norm: " + std::to_string(options.clip_norm) + "; above 0, or 0 for none");
  if (options.offload_chunk_elements < 1)
    throw InvalidUsage("offload piece: " + std::to_string(options.offload_chunk_elements) + " parameters; 1 or more");
  nn::validate(options.optimizer);
  if (!options.mesh) options.mesh = default_mesh(options.strategy, ranks, ranks);
  if (options.reshard_group_size == 0) return options;
  if (options.reshard_after_forward)
    throw InvalidUsage(
        "reshard_group_size and reshard_after_forward: one of the two says what is resharded after forward");
  const int shards = options.mesh->size_of(kShardAxis);
  if (options.reshard_group_size < 1 || shards % options.reshard_group_size != 0)
    throw InvalidUsage("reshard to " + std::to_string(options.reshard_group_size) + " ranks: must divide the " +
                       std::to_string(shards) + " shards of the mesh");
  if (options.reshard_group_size == 1 || options.reshard_group_size == shards) {
    options.reshard_after_forward = options.reshard_group_size != 1;
  } else {
    options.mesh = in_groups(*options.mesh, options.reshard_group_size);
    options.strategy = over_groups(std::move(options.strategy));
  }
  return options;
}

}  // namespace

Engine::Engine(nn::Module& model, comm::Communicator& world, EngineOptions options)
    : model_(model), options_(checked(std::move(options), world.size())) {
  model.validate_dtypes();
  std::vector<UnitSpec> specs = options_.wrap_policy ? make_units(model, options_.wrap_policy, options_.ignored)
                                                     : make_units(model, options_.wrap, options_.ignored);
  nn::Context& context = model.context();
  Mesh mesh(world, *options_.mesh);
  if (options_.cpu_offload) require_offload(context.runtime());
  fabric_.reset(new EngineResources{.context = context,
                                    .mesh = std::move(mesh),
                                    .gather_stream = context.make_stream(),
                                    .reduce_stream = context.make_stream(),
                                    .poison_stream = options_.poison ? context.make_stream() : nullptr,
                                    .parameters = nullptr,
                                    .gradients = nullptr,
                                    .buffers = nullptr,
                                    .all_gather = nullptr,
                                    .reduce_scatter = nullptr,
                                    .all_reduce = nullptr,
                                    .recorder = TraceRecorder(world.rank(), &context.runtime()),
                                    .copier = Copier(context.runtime()),
                                    .offload = nullptr,
                                    .offload_chunk_elements = options_.offload_chunk_elements,
                                    .reduce_dtype = options_.reduce_dtype});
  const auto unbooked = [this](std::size_t bytes) { return fabric_->allocate(bytes, std::nullopt); };
  LeasePool::Poison poison;
  if (options_.poison)
    poison = [this](const Event& released, void* data, std::size_t bytes) {
      return fabric_->poison(released, data, bytes);
    };
  fabric_->parameters =
      std::make_unique<LeasePool>(context.memory_tracker(), MemoryCategory::unsharded_parameter, unbooked, poison);
  fabric_->gradients =
      std::make_unique<LeasePool>(context.memory_tracker(), MemoryCategory::unsharded_gradient, unbooked, poison);
  fabric_->buffers =
      std::make_unique<LeasePool>(context.memory_tracker(), MemoryCategory::communication, unbooked, poison);

  if (options_.cpu_offload) fabric_->offload = std::make_unique<CpuOffload>(context, fabric_->copier, options_.poison);
  for (UnitSpec& spec : specs) add_unit(std::move(spec));
  progress_.resize(units_.size());
  make_collectives();
  resolve_prefetch_order();
  buffers_ = std::make_unique<ModuleBuffers>(model, *fabric_);
  order_ = std::make_unique<ExecOrderValidator>(world, context.runtime());
  mark_kept_units();
  if (options_.cpu_offload) reserve_pieces();
  if (measures_norm()) prepare_norm();
  publish_values();
  install_hooks();
}

Engine::~Engine() {
  if (fabric_->offload) fabric_->offload->finish();  // copies may still use memory that the units release
  nn::Context& context = model_.context();
  if (!context.runtime().host_accessible() && std::uncaught_exceptions() == 0) {
    try {
      context.stream().synchronize();  // the communicator reuses its memory immediately
    } catch (const Error&) {           // from an operation whose failure its caller already knows
    }
  }
  for (nn::Module* module : model_.modules()) module->set_hooks({});
  for (const auto& unit : units_)
    for (const auto& parameter : unit->spec().parameters) {
      nn::Tensor tensor = parameter->tensor();
      tensor.unbind("its engine is gone");
      parameter->gradient().unbind();
    }
}

void Engine::add_unit(UnitSpec spec) {
  std::optional<Strategy> own = options_.unit_strategy ? options_.unit_strategy(spec) : std::nullopt;
  const bool has_own = own.has_value();
  Strategy strategy = options_.strategy;
  if (has_own) {
    strategy = options_.mesh->size_of(kGroupAxis) > 1 ? over_groups(*std::move(own)) : *std::move(own);
    for (const auto member : {&Strategy::all_gather, &Strategy::reduce_scatter, &Strategy::all_reduce})
      if (strategy.*member != options_.strategy.*member)
        throw InvalidUsage("unit " + spec.name + ": its strategy " + strategy.name + " has another collective (" +
                           strategy.*member + ") than the engine's (" + options_.strategy.*member + ")");
  }
  ShardingPlan plan = make_plan(strategy, fabric_->mesh, options_.cpu_offload);
  if (plan.periodic && options_.use_loss_scaling)
    throw Unsupported("strategy " + strategy.name +
                      " has a period: its replicas would skip different steps of a scaled loss; use bf16 or f32");
  if (plan.periodic && options_.buffers != BufferSync::own)
    throw Unsupported("strategy " + strategy.name +
                      " has a period, between whose ends replicas are alone; leave buffers each rank's own");
  if (periodic_axis(strategy) != periodic_axis(options_.strategy) || (has_own && plan.periodic))
    throw Unsupported("unit " + spec.name + ": strategy " + strategy.name + " beside " + options_.strategy.name +
                      ", and units whose replicas meet once in a period can't be mixed");
  strategies_.push_back(std::move(strategy));
  units_.push_back(
      std::make_unique<ParamGroup>(*fabric_, std::move(spec), std::move(plan), nn::state_slots(options_.optimizer)));
}

void Engine::mark_kept_units() {
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const bool kept = keeps_after_forward(units_[i]->plan().sharded_after_forward, units_[i]->spec().is_root,
                                          i + 1 == units_.size(), options_.reshard_after_forward);
    units_[i]->set_kept_after_forward(kept);
  }
}

void Engine::resolve_prefetch_order() {
  std::map<std::string, std::size_t> numbers;
  std::string known;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    numbers[units_[i]->name()] = i;
    known += " " + units_[i]->name();
  }
  const auto number_of = [&](const std::string& name) {
    const auto found = numbers.find(name);
    if (found == numbers.end()) throw InvalidUsage("prefetch order: no unit '" + name + "'; there are" + known);
    return found->second;
  };
  const auto resolve = [&](const std::map<std::string, std::vector<std::string>>& wanted) {
    std::vector<std::vector<std::size_t>> resolved(units_.size());
    for (const auto& [unit, ahead] : wanted)
      for (const std::string& name : ahead) resolved[number_of(unit)].push_back(number_of(name));
    return resolved;
  };
  ahead_forward_ = resolve(options_.prefetch_order.forward);
  ahead_backward_ = resolve(options_.prefetch_order.backward);
}

void Engine::install_hooks() {
  bool root_is_unit = false;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    for (nn::Module* module : units_[i]->spec().modules) {
      nn::ModuleHooks hooks;
      const bool is_root = module == &model_;
      root_is_unit = root_is_unit || is_root;
      hooks.pre_forward = [this, i](nn::Phase phase) { pre_forward(i, phase); };
      hooks.post_forward = [this, i, module, is_root](nn::Phase phase) {
        post_forward(i, *module, phase);
        if (is_root && phase == nn::Phase::forward) end_root_forward();
      };
      hooks.pre_backward = [this, i] { pre_backward(i); };
      hooks.post_backward = [this, i, is_root] {
        post_backward(i);
        if (is_root) end_root_backward();
      };
      module->set_hooks(std::move(hooks));
    }
  }
  if (root_is_unit) return;
  model_.set_hooks({.pre_forward = [this](nn::Phase phase) { share_buffers(phase); },
                    .post_forward =
                        [this](nn::Phase phase) {
                          if (phase == nn::Phase::forward) end_root_forward();
                        },
                    .pre_backward = {},
                    .post_backward = [this] { end_root_backward(); }});
}

}  // namespace tessera::fsdp
