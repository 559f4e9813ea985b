#include "c10d/backend.h"

#include <ATen/Functions.h>
#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "c10d/errors.h"

namespace tessera::c10d_backend {
namespace {

using ::c10d::OpType;
using TorchWorkPtr = c10::intrusive_ptr<::c10d::Work>;

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (tensors.size() == 1) return tensors.front();
  C10_THROW_ERROR(ValueError, std::string("tessera: ") + operation + " takes one tensor of each rank, not " +
                                  std::to_string(tensors.size()));
}

/// A destructor may run with or without Python's lock; a callback that the communicator waits for may need it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() != 0 && PyGILState_Check() == 1 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

int place_of(int rank, const std::vector<int>& members) {
  return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
}

}  // namespace

TorchBackend::TorchBackend(const GroupSettings& settings, std::string name)
    : Backend(settings.rank, settings.size),
      name_(std::move(name)),
      monitored_barrier_(settings.store, settings.rank, settings.size),
      ranks_(std::make_shared<Communicators>(settings)),
      timeout_(settings.timeout) {
  init();
}

TorchBackend::TorchBackend(const TorchBackend& parent, const GroupSettings& settings, const std::string& group_name,
                           std::string name)
    : Backend(settings.rank, settings.size),
      name_(std::move(name)),
      monitored_barrier_(settings.store, settings.rank, settings.size),
      timeout_(settings.timeout) {
  const WithoutGil without_gil;
  ranks_ = std::make_shared<Communicators>(parent.shared_ranks(), settings, group_name);
  init();
}

TorchBackend::~TorchBackend() { shutdown(); }

void TorchBackend::eagerConnectSingleDevice(at::Device device) {
  const std::lock_guard lock(mutex_);
  with_torch_errors([&] { ranks().on(device); });
}

std::string TorchBackend::transport() const {
  const std::lock_guard lock(mutex_);
  return std::string(ranks().host().backend());
}

#if TESSERA_TORCH >= 209
void TorchBackend::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

c10::intrusive_ptr<::c10d::Backend::Options> TorchBackend::getBackendOptions() {
  const std::lock_guard lock(mutex_);
  return c10::make_intrusive<Options>(timeout_);
}

c10::intrusive_ptr<::c10d::Backend> TorchBackend::split(const c10::intrusive_ptr<::c10d::Store>& store,
                                                        const std::vector<int>& ranks,
                                                        const c10::intrusive_ptr<::c10d::Backend::Options>& options) {
  const GroupSettings settings{.store = store,
                               .rank = place_of(getRank(), ranks),
                               .size = static_cast<int>(ranks.size()),
                               .timeout = options->timeout,
                               .global_ranks = ranks,
                               .device = getBoundDeviceId()};
  return c10::make_intrusive<TorchBackend>(*this, settings, options->group_name, name_);
}
#endif

std::uint64_t TorchBackend::getSequenceNumberForGroup() {
  const std::lock_guard lock(mutex_);
  return calls_;
}

Communicators& TorchBackend::ranks() const {
  if (ranks_ != nullptr) return *ranks_;
  C10_THROW_ERROR(DistBackendError, "tessera: this process group was destroyed; create another one");
}

std::shared_ptr<Communicators> TorchBackend::shared_ranks() const {
  const std::lock_guard lock(mutex_);
  static_cast<void>(ranks());  // throws if it was shut down
  return ranks_;
}

void TorchBackend::abort() {
  const std::lock_guard lock(mutex_);
  if (ranks_ != nullptr) ranks_->abort("the program aborted its process group");
}

void TorchBackend::shutdown() {
  const WithoutGil without_gil;
  std::shared_ptr<Communicators> ranks;
  {
    const std::lock_guard lock(mutex_);
    ranks = std::move(ranks_);
  }
}

void TorchBackend::remember(const std::shared_ptr<PendingCall>& call) {
  constexpr std::size_t kMany = 64;
  if (in_flight_.size() >= kMany)
    std::erase_if(in_flight_, [](const auto& one) {
      const auto call = one.lock();
      return call == nullptr || call->done();
    });
  if (!call->done()) in_flight_.push_back(call);
}

void TorchBackend::leave(std::chrono::milliseconds patience) {
  std::vector<std::weak_ptr<PendingCall>> in_flight;
  {
    const std::lock_guard lock(mutex_);
    in_flight.swap(in_flight_);
  }
  const auto until = std::chrono::steady_clock::now() + patience;
  for (const auto& one : in_flight) {
    const auto call = one.lock();
    try {
      if (call == nullptr || call->wait_until(until)) continue;
    } catch (const std::exception&) {  // it has ended
      continue;
    }
    const std::lock_guard lock(mutex_);
    if (ranks_ != nullptr) ranks_->abort("its process ends while an operation is in flight");
    break;
  }
  wait_for_callbacks(until);
  shutdown();
}

bool TorchBackend::supportsTensorAlloc(c10::DeviceIndex index) { return index <= 0; }

at::Tensor TorchBackend::allocateTensor(long count, at::TensorOptions options) {
  if (!options.device().is_cpu())
    C10_THROW_ERROR(NotImplementedError, "tessera: memory of " + options.device().str() + " can't be allocated");
  const std::size_t bytes = static_cast<std::size_t>(count) * options.dtype().itemsize();
  auto memory = with_torch_errors([&] {
    const std::lock_guard lock(mutex_);
    return std::make_shared<base::Buffer>(ranks().host().allocate(bytes, comm::MemoryKind::host, std::nullopt));
  });
  return at::from_blob(
      memory->data(), {static_cast<std::int64_t>(count)}, [memory](void*) {}, options);
}

TorchWorkPtr TorchBackend::issue(Call call) {
  const c10::Device device = common_device(call.holding.tensors);
  const std::lock_guard lock(mutex_);
  comm::OpOptions options{.timeout = call.timeout > std::chrono::milliseconds(0) ? call.timeout : timeout_};
  std::vector<comm::Work> works;
  std::unique_ptr<base::Stream> after;
  CallDevice on;
  with_torch_errors([&] {
    comm::Communicator& communicator = ranks().on(device);
    // A call without tensors, a barrier, comes after the program's work on the group's device.
    const bool ordered = !device.is_cpu() || call.holding.tensors.empty();
    if (const auto& own = ranks().device(); own != nullptr && ordered) {
      after = own->current_stream();
      options.after = after.get();
    }
    for (const Issue& one : call.issues) works.push_back(one(communicator, options));
    if (!device.is_cpu()) on = {ranks().device(), ranks().device_uses_streams()};
  });
  const std::uint64_t number = ++calls_;
  const auto pending = std::make_shared<PendingCall>(std::move(works), std::move(call.holding), std::move(on));
  if (coalescing_) {
    coalesced_.push_back(pending);
    coalesced_results_.insert(coalesced_results_.end(), call.results.begin(), call.results.end());
  }
  remember(pending);
  const std::vector<at::Tensor> inputs = call.inputs.empty() ? call.results : std::move(call.inputs);
  return c10::make_intrusive<TorchWork>(getRank(), call.type, (name_ + ":" + call.title).c_str(), inputs, number,
                                        std::vector{pending}, std::move(call.results));
}

void TorchBackend::startCoalescing() {
  const std::lock_guard lock(mutex_);
  coalescing_ = true;
}

/// Operations are issued when they are called, since none waits for a later one; only their handle is common.
TorchWorkPtr TorchBackend::endCoalescing() {
  const std::lock_guard lock(mutex_);
  coalescing_ = false;
  return c10::make_intrusive<TorchWork>(getRank(), OpType::COALESCED, nullptr, std::vector<at::Tensor>{}, calls_,
                                        std::exchange(coalesced_, {}), std::exchange(coalesced_results_, {}));
}

TorchWorkPtr TorchBackend::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& options) {
  Call call{OpType::BROADCAST, options.timeout, {}, {}, tensors, "broadcast"};
  const at::Tensor tensor = writable(only(tensors, "broadcast"), call.holding, options.rootRank == getRank());
  call.issues.emplace_back([view = moved(tensor), root = static_cast<int>(options.rootRank)](auto& world, auto how) {
    return world.broadcast(view, view, root, how);
  });
  return issue(std::move(call));
}

TorchBackend::Issue TorchBackend::reduction_in_place(const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                                     Holding& holding) {
  const Reduction reduction = Reduction::of(op, tensor.scalar_type());
  const at::Tensor dense = writable(tensor, holding, true);
  return [view = reduction.view(dense), op = reduction.op](comm::Communicator& world, const comm::OpOptions& how) {
    return world.all_reduce(view, view, op, how);
  };
}

TorchWorkPtr TorchBackend::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& options) {
  if (!tensors.empty() && tensors.front().is_sparse()) return allreduce_sparse(tensors, options);
  Call call{OpType::ALLREDUCE, options.timeout, {}, {}, tensors, "all_reduce"};
  for (const at::Tensor& tensor : tensors)
    call.issues.push_back(reduction_in_place(tensor, options.reduceOp, call.holding));
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                               const ::c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

TorchWorkPtr TorchBackend::reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& options) {
  Call call{OpType::REDUCE, options.timeout, {}, {}, tensors, "reduce"};
  const at::Tensor& tensor = only(tensors, "reduce");
  const Reduction reduction = Reduction::of(options.reduceOp, tensor.scalar_type());
  const bool is_root = options.rootRank == getRank();
  const at::Tensor dense = is_root ? writable(tensor, call.holding, true) : readable(tensor, call.holding);
  call.issues.emplace_back([view = reduction.view(dense), op = reduction.op, root = static_cast<int>(options.rootRank)](
                               auto& world, auto how) { return world.reduce(view, view, op, root, how); });
  return issue(std::move(call));
}

void TorchBackend::check_count(std::size_t have, std::size_t want, const char* what) const {
  if (have == want) return;
  C10_THROW_ERROR(ValueError, std::string("tessera: ") + what + " has " + std::to_string(have) + " elements, not " +
                                  std::to_string(want) + "; the process group has " + std::to_string(getSize()) +
                                  " ranks");
}

TorchBackend::Issue TorchBackend::gathering(const at::Tensor& output, const at::Tensor& input, Holding& holding) {
  check_count(static_cast<std::size_t>(output.numel()),
              static_cast<std::size_t>(input.numel()) * static_cast<std::size_t>(getSize()), "all_gather: the output");
  const comm::View in = moved(readable(input, holding));
  return [in, out = moved(writable(output, holding, false))](auto& world, auto how) {
    return world.all_gather(in, out, how);
  };
}

TorchWorkPtr TorchBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const ::c10d::AllgatherOptions& options) {
  Call call{OpType::_ALLGATHER_BASE, options.timeout, {}, {}, {output}, "_all_gather_base", {input}};
  call.issues.push_back(gathering(output, input, call.holding));
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                           std::vector<at::Tensor>& inputs,
                                                           const ::c10d::AllgatherOptions& options) {
  check_count(outputs.size(), inputs.size(), "all_gather: the list of outputs");
  Call call{OpType::ALLGATHER_COALESCED, options.timeout, {}, {}, outputs, "all_gather_into_tensor_coalesced", inputs};
  for (std::size_t i = 0; i < inputs.size(); ++i) call.issues.push_back(gathering(outputs[i], inputs[i], call.holding));
  return issue(std::move(call));
}

TorchBackend::Issue TorchBackend::gathering_lists(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                                  Holding& holding) {
  check_count(outputs.size(), static_cast<std::size_t>(getSize()), "all_gather: the list of outputs");
  const comm::View in = moved(readable(input, holding));
  const comm::View out = moved(to_be_split(outputs, holding));
  if (equal_sizes(outputs)) return [in, out](auto& world, auto how) { return world.all_gather(in, out, how); };
  return [in, out, counts = counts_of(outputs)](auto& world, auto how) {
    return world.all_gather_v(in, out, counts, how);
  };
}

TorchWorkPtr TorchBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                     const ::c10d::AllgatherOptions& options) {
  check_count(outputs.size(), 1, "all_gather: the list of lists of outputs");
  Call call{OpType::ALLGATHER, options.timeout, {}, {}, outputs.front(), "all_gather", inputs};
  call.issues.push_back(gathering_lists(outputs.front(), only(inputs, "all_gather"), call.holding));
  return issue(std::move(call));
}

/// outputs[r][i] = rank r's inputs[i].
TorchWorkPtr TorchBackend::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                               std::vector<at::Tensor>& inputs,
                                               const ::c10d::AllgatherOptions& options) {
  check_count(outputs.size(), static_cast<std::size_t>(getSize()), "all_gather: the list of lists of outputs");
  Call call{OpType::ALLGATHER_COALESCED, options.timeout, {}, {}, {}, "all_gather_coalesced", inputs};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::vector<at::Tensor> of_input;
    for (const std::vector<at::Tensor>& of_rank : outputs) {
      check_count(of_rank.size(), inputs.size(), "all_gather: the list of a rank's outputs");
      of_input.push_back(of_rank[i]);
      call.results.push_back(of_rank[i]);
    }
    call.issues.push_back(gathering_lists(of_input, inputs[i], call.holding));
  }
  return issue(std::move(call));
}

TorchBackend::Issue TorchBackend::scattering(const at::Tensor& output, const at::Tensor& input,
                                             const ::c10d::ReduceOp& op, Holding& holding) {
  check_count(static_cast<std::size_t>(input.numel()),
              static_cast<std::size_t>(output.numel()) * static_cast<std::size_t>(getSize()),
              "reduce_scatter: the input");
  const Reduction reduction = Reduction::of(op, input.scalar_type());
  const comm::View in = reduction.view(readable(input, holding));
  const at::Tensor result = writable(output, holding, false);
  return [in, out = reduction.view(result), op = reduction.op](auto& world, auto how) {
    return world.reduce_scatter(in, out, op, how);
  };
}

TorchWorkPtr TorchBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const ::c10d::ReduceScatterOptions& options) {
  Call call{OpType::_REDUCE_SCATTER_BASE, options.timeout, {}, {}, {output}, "_reduce_scatter_base", {input}};
  call.issues.push_back(scattering(output, input, options.reduceOp, call.holding));
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                           std::vector<at::Tensor>& inputs,
                                                           const ::c10d::ReduceScatterOptions& options) {
  check_count(outputs.size(), inputs.size(), "reduce_scatter: the list of outputs");
  Call call{OpType::_REDUCE_SCATTER_BASE, options.timeout, {}, {}, outputs, "reduce_scatter_tensor_coalesced", inputs};
  for (std::size_t i = 0; i < inputs.size(); ++i)
    call.issues.push_back(scattering(outputs[i], inputs[i], options.reduceOp, call.holding));
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                          std::vector<std::vector<at::Tensor>>& inputs,
                                          const ::c10d::ReduceScatterOptions& options) {
  check_count(inputs.size(), 1, "reduce_scatter: the list of lists of inputs");
  check_count(inputs.front().size(), static_cast<std::size_t>(getSize()), "reduce_scatter: the list of inputs");
  Call call{OpType::REDUCE_SCATTER, options.timeout, {}, {}, outputs, "reduce_scatter", inputs.front()};
  const at::Tensor& output = only(outputs, "reduce_scatter");
  const Reduction reduction = Reduction::of(options.reduceOp, output.scalar_type());
  const comm::View in = reduction.view(joined(inputs.front(), call.holding));
  const at::Tensor result = writable(output, call.holding, false);
  std::vector<std::size_t> counts;
  for (const at::Tensor& part : inputs.front())
    counts.push_back(static_cast<std::size_t>(part.numel()) * reduction.per_element);
  call.issues.emplace_back([in, out = reduction.view(result), op = reduction.op, counts = std::move(counts),
                            equal = equal_sizes(inputs.front())](auto& world, auto how) {
    return equal ? world.reduce_scatter(in, out, op, how) : world.reduce_scatter_v(in, out, counts, op, how);
  });
  return issue(std::move(call));
}

TorchWorkPtr TorchBackend::barrier(const ::c10d::BarrierOptions& options) {
  Call call{OpType::BARRIER, options.timeout, {}, {}, {}, "barrier"};
  call.issues.emplace_back([](auto& world, auto how) { return world.barrier(how); });
  return issue(std::move(call));
}

void TorchBackend::monitoredBarrier(const ::c10d::BarrierOptions& options, bool all_ranks) {
  const auto ranks = shared_ranks();
  std::unique_lock lock(mutex_);
  const auto timeout = options.timeout == ::c10d::kUnsetTimeout ? timeout_ : options.timeout;
  lock.unlock();
  with_torch_errors([&] {
    monitored_barrier_.pass(timeout, all_ranks, [&] {
      const std::lock_guard lock(mutex_);
      ranks->host().batch({});  // throws if the group has failed
    });
  });
}

}  // namespace tessera::c10d_backend
