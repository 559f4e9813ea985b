#include "tessera/fsdp/engine/engine_core.h"

#include <algorithm>
#include <chrono>
#include <locale>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::fsdp {
namespace {

constexpr std::chrono::seconds kDrainTime{1};  ///< in which operations end that all ranks call
constexpr std::chrono::seconds kStopTime{10};  ///< in which a device ends its work after an abort

void require_offload(const base::DeviceRuntime& runtime) {
  if (runtime.host_accessible())
    throw InvalidUsage("cpu offload: device " + base::name_of(runtime.device()) +
                       " already uses host memory; disable cpu_offload");
}

void set_group_size(EngineOptions& options) {
  const int group = options.reshard_group_size;
  if (options.reshard_after_forward)
    throw InvalidUsage("reshard_group_size and reshard_after_forward are both set; set only one of them");
  const int shards = options.mesh->size_of(kShardAxis);
  if (group < 1 || shards % group != 0)
    throw InvalidUsage("reshard_group_size: " + std::to_string(group) + " does not divide the " +
                       std::to_string(shards) + " shards of the mesh; choose a divisor");
  if (options.strategy.param_at_rest.empty()) return;  // it reshards nothing
  if (group == 1 || group == shards) {
    options.reshard_after_forward = group != 1;
  } else {
    options.mesh = in_groups(*options.mesh, group);
    options.strategy = over_groups(std::move(options.strategy));
  }
}

template <class... Values>
std::string spaced(const Values&... values) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // the same text on all ranks, whatever their programs' locales
  text.precision(17);
  ((text << values << ' '), ...);
  return text.str().substr(0, text.str().size() - 1);
}

std::string text_of(const MeshShape& mesh) {
  std::string text;
  for (const MeshAxis& axis : mesh.axes) text += (text.empty() ? "" : " x ") + spaced(axis.size, axis.name);
  return text;
}

/// Names, sizes and types of units, and the strategies of those that have one of their own.
std::string text_of(const std::vector<UnitSpec>& units, const std::vector<std::optional<Strategy>>& own) {
  std::string text;
  for (std::size_t i = 0; i < units.size(); ++i) {
    std::int64_t elements = 0;
    std::set<std::string_view> dtypes;
    for (const auto& parameter : units[i].parameters) {
      elements += parameter->count();
      dtypes.insert(base::name_of(parameter->dtype()));
    }
    text += (text.empty() ? "" : ", ") + units[i].name + " of " + std::to_string(elements);
    for (const std::string_view dtype : dtypes) text += ' ' + std::string(dtype);
    if (own[i]) text += " by " + own[i]->name + " (" + describe(*own[i]) + ")";
  }
  return text;
}

std::string text_of(const std::map<std::string, std::vector<std::string>>& prefetched) {
  std::string text;
  for (const auto& [unit, others] : prefetched) {
    text += (text.empty() ? "" : ", ") + unit + ":";
    for (const std::string& other : others) text += ' ' + other;
  }
  return text;
}

/// What decides which operations the ranks call, and what these compute.
std::vector<comm::SharedSetting> shared_settings(const EngineOptions& options, const std::vector<UnitSpec>& units,
                                                 const std::vector<std::optional<Strategy>>& own,
                                                 const std::string& products) {
  constexpr const char* kNorms[] = {"one", "two", "three", "infinity"};
  const OptimizerConfig& o = options.optimizer;
  const auto flag = [](std::optional<bool> value) { return value ? *value ? "true" : "false" : "default"; };
  return {
      {"TESSERA_PRODUCTS", products.empty() ? "not chosen" : products},
      {"strategy", options.strategy.name + ": " + describe(options.strategy)},
      {"mesh", text_of(*options.mesh)},
      {"units", text_of(units, own)},
      {"prefetch", spaced(options.prefetch, options.backward_prefetch == BackwardPrefetch::pre ? "pre" : "post")},
      {"prefetch_order.forward", text_of(options.prefetch_order.forward)},
      {"prefetch_order.backward", text_of(options.prefetch_order.backward)},
      {"limit_all_gathers", spaced(options.limit_all_gathers, options.limit_gather_bytes)},
      {"reshard_after_forward", flag(options.reshard_after_forward)},
      {"reshard_group_size", spaced(options.reshard_group_size)},
      {"reshard_after_backward", flag(options.reshard_after_backward)},
      {"program_optimizer", options.program_optimizer ? spaced(options.program_optimizer->slots, "slots") : "none"},
      {"optimizer",
       spaced(base::name_of(o.kind), "betas", o.beta1, o.beta2, "eps", o.eps, "weight_decay", o.decay(), "momentum",
              o.momentum, o.nesterov ? "nesterov" : "", o.amsgrad ? "amsgrad" : "", o.maximize ? "maximize" : "")},
      {"reduce_dtype", options.reduce_dtype ? std::string(base::name_of(*options.reduce_dtype)) : "default"},
      {"clip_norm", spaced(options.clip_norm)},
      {"norm", kNorms[static_cast<int>(options.norm)]},
      {"measure_norm", flag(options.measures_norm())},
      {"use_loss_scaling", flag(options.use_loss_scaling)},
      {"buffers", spaced(static_cast<int>(options.buffers))},
  };
}

}  // namespace

/// Checks what can be checked before ranks communicate, sets the mesh and divides the model.
EngineCore::Setup EngineCore::checked(Model& model, EngineOptions options, int ranks) {
  if (options.limit_all_gathers < 0)
    throw InvalidUsage("limit_all_gathers: " + std::to_string(options.limit_all_gathers) +
                       " units; pass 0 (no limit) or more");
  if (options.prefetch < 0)
    throw InvalidUsage("prefetch: " + std::to_string(options.prefetch) + " units; pass 0 or more");
  if (options.clip_norm < 0)
    throw InvalidUsage("clip_norm: " + std::to_string(options.clip_norm) + "; pass a norm above 0, or 0 for none");
  if (options.offload_chunk_elements < 1)
    throw InvalidUsage("offload_chunk_elements: " + std::to_string(options.offload_chunk_elements) +
                       " elements; pass 1 or more");
  validate(options.optimizer);
  if (const auto& own = options.program_optimizer;
      own && (own->slots < 0 || own->slots > kMaxStateSlots || !own->update))
    throw InvalidUsage("program_optimizer: " + std::to_string(own->slots) + " slots" +
                       (own->update ? "" : " and no update") + "; pass 0 to " + std::to_string(kMaxStateSlots) +
                       " slots and a function");
  if (!options.mesh) options.mesh = default_mesh(options.strategy, ranks, ranks);
  if (options.reshard_group_size != 0) set_group_size(options);
  model.validate();
  std::vector<UnitSpec> specs = options.wrap_policy ? make_units(model.root(), options.wrap_policy, options.ignored)
                                                    : make_units(model.root(), options.wrap, options.ignored);
  if (options.cpu_offload) require_offload(model.runtime().device_runtime());
  if (options.buffers == BufferSync::maximum)
    for (const auto& buffer : model.root().buffers())
      if (buffer->dtype() != DType::f32)
        throw InvalidUsage("buffers: " + buffer->name() + " is " + std::string(base::name_of(buffer->dtype())) +
                           "; BufferSync::maximum needs f32");
  std::vector<std::optional<Strategy>> own;
  for (const UnitSpec& spec : specs) own.push_back(options.unit_strategy ? options.unit_strategy(spec) : std::nullopt);
  return {std::move(options), std::move(specs), std::move(own), nullptr};
}

EngineCore::Setup EngineCore::alike(Model& model, comm::Communicator& world, Setup setup) {
  setup.order = std::make_unique<ExecOrderValidator>(world, model.runtime().device_runtime());
  comm::require_alike(setup.order->host(),
                      shared_settings(setup.options, setup.specs, setup.own, model.runtime().products()), "engine");
  return setup;
}

EngineCore::EngineCore(Model& the_model, comm::Communicator& world, EngineOptions the_options)
    : EngineCore(the_model, world, alike(the_model, world, checked(the_model, std::move(the_options), world.size()))) {}

EngineCore::EngineCore(Model& the_model, comm::Communicator& world, Setup setup)
    : model(the_model),
      options(std::move(setup.options)),
      resources(model.runtime(), world, options),
      order(std::move(setup.order)) {
  for (std::size_t i = 0; i < setup.specs.size(); ++i) add_unit(std::move(setup.specs[i]), std::move(setup.own[i]));
  create_collectives();
  buffers = std::make_unique<ModuleBuffers>(model.root(), resources);
  mark_kept_units();
  if (resources.offload) reserve_offload_chunks();
  if (options.measures_norm()) norm = std::make_unique<GradNorm>(*this);
}

EngineCore::~EngineCore() {
  for (const auto& unit : units)
    for (const auto& parameter : unit->group.spec().parameters) {
      parameter->unbind("its engine is gone");
      parameter->unbind_gradient();
    }
}

void EngineCore::add_unit(UnitSpec spec, std::optional<Strategy> own) {
  const bool has_own = own.has_value();
  Strategy strategy = options.strategy;
  if (has_own) {
    strategy = options.mesh->size_of(kGroupAxis) > 1 ? over_groups(*std::move(own)) : *std::move(own);
    for (const auto member : {&Strategy::all_gather, &Strategy::reduce_scatter, &Strategy::all_reduce})
      if (strategy.*member != options.strategy.*member)
        throw InvalidUsage("unit " + spec.name + ": strategy " + strategy.name + " uses collective " +
                           strategy.*member + " but the engine uses " + options.strategy.*member +
                           "; use the same collectives in all units");
  }
  ShardingPlan plan = make_plan(strategy, resources.mesh, options.cpu_offload);
  if (plan.periodic && options.use_loss_scaling)
    throw Unsupported(
        "strategy " + strategy.name +
        ": with a sync period, loss scaling would skip different steps on different replicas; use bf16 or "
        "f32");
  if (plan.periodic && options.buffers != BufferSync::own)
    throw Unsupported("strategy " + strategy.name +
                      ": with a sync period, buffers cannot be synchronized in every step; use BufferSync::own");
  if (periodic_axis(strategy) != periodic_axis(options.strategy) || (has_own && plan.periodic))
    throw Unsupported("unit " + spec.name + ": strategy " + strategy.name + " cannot be combined with " +
                      options.strategy.name + ": a sync period applies to all units; set it in the engine's strategy");
  units.push_back(std::make_unique<UnitRuntime>(resources, std::move(spec), std::move(strategy), std::move(plan),
                                                options.optimizer_slots()));
}

void EngineCore::mark_kept_units() {
  for (const auto& unit : units)
    unit->group.set_kept_after_forward(keeps_after_forward(unit->plan().sharded_after_forward,
                                                           unit->group.spec().is_root, unit == units.back(),
                                                           options.reshard_after_forward));
}

void EngineCore::create_collectives() {
  resources.collectives.create(options.collectives, options.strategy);
  for (const auto& unit : units)
    for (const FlatParameter& flat : unit->group.flats())
      if (flat.trainable())
        validate_collectives(unit->strategy, resources.mesh.shape(), flat.precision, options.collectives);
  resources.collectives.prepare(resources.runtime, resources.buffers, [this](comm::OpKind collective) {
    std::vector<TransferSpec> all;
    for (const auto& unit : units)
      for (TransferSpec& transfer : unit->group.transfers_of(collective)) all.push_back(std::move(transfer));
    return all;
  });
}

void EngineCore::clear_plugin_state() {
  Stream& stream = resources.compute();
  stream.wait(resources.reduce_stream->record());  // where plug-ins use it
  resources.collectives.clear_state(stream);
}

void EngineCore::reserve_offload_chunks() {
  std::size_t most = 0;
  for (const auto& unit : units) most = std::max(most, unit->optimizer.chunk_bytes());
  resources.offload->reserve(most);
}

std::uint64_t EngineCore::sync_period() const {
  const std::optional<ShardingPlan::SyncPlan>& periodic = units.front()->plan().periodic;
  return periodic ? static_cast<std::uint64_t>(periodic->steps) : 1;
}

void EngineCore::join_step() {
  for (const auto& unit : units) unit->group.wait_for_gathers();
  resources.join_offload();
}

void EngineCore::begin_writing_values() {
  join_step();
  if (resources.offload) resources.compute().synchronize();  // the host itself writes to memory that copies read
}

void EngineCore::publish_values() {
  const Event written = resources.compute().record();
  resources.gather_stream->wait(written);
  if (resources.offload) resources.offload->up().wait(written);
}

void EngineCore::exchange_order() {
  if (std::exchange(order_exchange_begun, true)) return;
  abort_on_mismatch([this] { order->begin("step " + std::to_string(steps + 1)); });
}

void EngineCore::compare_libraries() {
  const std::vector<std::string> texts = comm::texts_of_ranks(order->host(), resources.runtime.libraries());
  const bool equal = std::ranges::adjacent_find(texts, std::not_equal_to<>()) == texts.end();
  const std::shared_ptr<base::Logger>& logger = order->host().communicator().logger();
  if (std::exchange(libraries_compared, true) || equal || logger == nullptr || order->host().rank() != 0) return;
  logger->write(base::LogLevel::warn,
                "the ranks' processors or libraries round differently: " + comm::by_value(texts) +
                    "; on other hosts this training ends with other bits (on the host, TESSERA_PRODUCTS=own gives the "
                    "same everywhere)");
}

void EngineCore::agree(const std::string& what) {
  order_exchange_begun = false;
  agree_on_order(what);
}

void EngineCore::agree_on_order(const std::string& next) {
  abort_on_mismatch([&] { order->agree(next); });
}

template <class Check>
void EngineCore::abort_on_mismatch(Check&& check) {
  try {
    check();
  } catch (const base::Mismatch& error) {
    abort_channels(error.what());
    throw;
  }
}

void EngineCore::abort_channels(const std::string& reason) noexcept {
  for (const auto& [axis, channels] : resources.mesh.all_channels())
    for (comm::Communicator* channel : {channels.gather.get(), channels.reduce.get(), channels.control.get()})
      channel->abort(reason);
  if (buffers != nullptr) buffers->abort(reason);
  if (order != nullptr) order->abort(reason);
}

void EngineCore::drain_after_exception() {
  // A host stream runs its work in a waiting caller, so there is nothing to wait for.
  const base::Event end =
      resources.runtime.device_runtime().host_accessible() ? base::Event() : resources.compute().record();
  const auto reached_within = [&](std::chrono::microseconds time) {
    constexpr std::chrono::microseconds kPause{200};
    for (; time > time.zero(); time -= kPause) {
      if (end.done() && order->idle()) return true;
      std::this_thread::sleep_for(kPause);
    }
    return false;
  };
  if (reached_within(kDrainTime)) return;
  abort_channels("an exception ended the engine while operations were in flight");
  reached_within(kStopTime);
}

UnitRuntime::UnitRuntime(EngineResources& resources, UnitSpec spec, Strategy own_strategy, ShardingPlan plan,
                         int optimizer_slots)
    : strategy(std::move(own_strategy)),
      group(resources, std::move(spec), std::move(plan), optimizer_slots),
      reducer(resources, group),
      optimizer(resources, group, reducer),
      sync(resources, group),
      state(resources, group) {}

void UnitRuntime::lay_out_again(std::uint64_t steps) {
  const GroupState::FullState full = state.download_all();
  optimizer.begin_training_of_unfrozen(steps);
  group.lay_out();
  optimizer.lay_out();
  state.load_all(full);
}

void UnitRuntime::reset() {
  reducer.reset();
  sync.reset();
  for (FlatParameter& flat : group.flats()) flat.full_values = Buffer();
  group.reset();
}

}  // namespace tessera::fsdp
