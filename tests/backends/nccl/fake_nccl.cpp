#include "tests/backends/nccl/fake_nccl.h"

#include <algorithm>
#include <cstring>

#include "tests/backends/nccl/fake_comm.h"

namespace tessera::nccl_test {
namespace {

/// A call between group start and end of this thread.
struct Pending {
  FakeComm* comm = nullptr;
  cudaStream_t stream = nullptr;
  std::optional<Contribution> collective;
  std::shared_ptr<Message> message;
  bool sends = false;
  int peer = 0;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> group_calls;

FakeStream::Task guarded(FakeComm& comm, FakeStream::Task task) {
  return [aborted = comm.aborted, world_rank = comm.world_rank, task = std::move(task)] {
    if (*aborted) return true;  // the kernel ends, however far it is
    return !fake_state().broken.contains(world_rank) && task();
  };
}

bool between_windows(const FakeComm& comm, const Contribution& part) {
  const auto ranks = static_cast<std::size_t>(comm.clique->size);
  const std::size_t bytes = part.count * base::size_of(dtype_of_vendor(part.type));
  const bool gathers = part.kind == Contribution::Kind::all_gather;
  const bool scatters = part.kind == Contribution::Kind::reduce_scatter;
  return find_offset(comm, part.in, scatters ? bytes * ranks : bytes) &&
         find_offset(comm, part.out, gathers ? bytes * ranks : bytes);
}

bool by_copy_engines(const FakeComm& comm, const Contribution& part) {
  return part.kind == Contribution::Kind::all_gather && comm.zero_policy && between_windows(comm, part);
}

FakeStream::Task collective_task(FakeComm& comm, const Contribution& part) {
  if (by_copy_engines(comm, part)) {
    const auto call = std::make_shared<CopyEngineCall>(CopyEngineCall{comm.device, comm.aborted});
    fake_state().copy_engine_calls.push_back(call);
    return [call, clique = comm.clique, number = comm.rounds++, rank = comm.rank, part] {
      call->done = call->done || (!*call->aborted && clique->join(number, rank, part));
      return call->done;
    };
  }
  return guarded(comm, [clique = comm.clique, number = comm.rounds++, rank = comm.rank, part] {
    return clique->join(number, rank, part);
  });
}

/// Sends and receives that progress together.
FakeStream::Task message_task(FakeComm& comm, std::vector<Pending> calls) {
  return guarded(comm, [clique = comm.clique, rank = comm.rank, calls = std::move(calls), posted = false]() mutable {
    bool all = true;
    for (const Pending& call : calls) {
      const auto ends = call.sends ? std::pair(rank, call.peer) : std::pair(call.peer, rank);
      if (!posted) (call.sends ? clique->sent : clique->received)[ends].push_back(call.message);
      clique->match(ends.first, ends.second);
      all = all && call.message->done;
    }
    posted = true;
    return all;
  });
}

/// A communicator's first calls last until the other ranks make theirs.
void connect(FakeComm& comm, const std::set<int>& peers) {
  if (!fake_state().options.connects) return;
  for (const int peer : peers) comm.clique->connecting.insert({comm.rank, peer});
  comm.ready = [clique = comm.clique, rank = comm.rank, peers] {
    return std::all_of(peers.begin(), peers.end(), [&](int peer) { return clique->connecting.contains({peer, rank}); });
  };
}

/// The ranks that `calls` exchange data with.
std::set<int> peers_of(const FakeComm& comm, const std::vector<Pending>& calls) {
  std::set<int> peers;
  for (const Pending& call : calls) {
    if (call.comm != &comm) continue;
    if (!call.collective) peers.insert(call.peer);
    for (int r = 0; call.collective && r < comm.clique->size; ++r) peers.insert(r);
  }
  return peers;
}

/// Enqueues `calls` on their streams, or holds them back until the communicator is no longer in progress.
ncclResult_t enqueue(const std::vector<Pending>& calls) {
  const auto lock = fake_lock();
  std::map<FakeComm*, std::vector<Pending>> messages;
  ncclResult_t result = ncclSuccess;
  for (const Pending& call : calls) {
    if (stream_of(call.stream).device != call.comm->device) return refuse("a stream of another device");
    if (call.collective)
      call.comm->held.emplace_back(call.stream, collective_task(*call.comm, *call.collective));
    else
      messages[call.comm].push_back(call);
  }
  for (auto& [comm, parts] : messages) {
    const cudaStream_t stream = parts.front().stream;
    comm->held.emplace_back(stream, message_task(*comm, std::move(parts)));
  }
  for (const Pending& call : calls) {
    connect(*call.comm, peers_of(*call.comm, calls));
    if (call.comm->start() == ncclInProgress) result = ncclInProgress;
  }
  for (const Pending& call : calls)
    if (!call.comm->in_progress()) {
      for (auto& [stream, task] : call.comm->held) stream_of(stream).tasks.push_back(std::move(task));
      call.comm->held.clear();
    }
  return result;
}

/// Ends the group of this thread.
ncclResult_t launch() {
  std::vector<Pending> calls;
  calls.swap(group_calls);
  ncclResult_t result = enqueue(calls);
  std::set<FakeComm*> comms;
  for (const Pending& call : calls) comms.insert(call.comm);
  for (FakeComm* comm : comms) result = finish(*comm, result);
  return result;
}

int delay_of_calls() {
  const auto lock = fake_lock();
  return fake_state().options.delay_ms;
}

ncclResult_t enter(Pending call) {
  if (const int delay = delay_of_calls(); delay > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  {
    const auto lock = fake_lock();
    if (group_depth == 0 && call.comm->in_progress()) return refuse("a call on a communicator that is in progress");
    if (*call.comm->aborted || call.comm->finalized) return refuse("a call on a communicator that has ended");
    group_calls.push_back(std::move(call));
  }
  return group_depth == 0 ? launch() : ncclSuccess;
}

void count_symmetric(const FakeComm& comm, const Contribution& part) {
  const auto lock = fake_lock();
  if (!between_windows(comm, part)) return;
  ++fake_state().counts.symmetric_calls;
  if (by_copy_engines(comm, part)) ++fake_state().counts.copy_engine_calls;
}

ncclResult_t collective(Contribution part, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  static constexpr ReduceOp::Kind kKinds[] = {ReduceOp::Kind::sum, ReduceOp::Kind::prod, ReduceOp::Kind::max,
                                              ReduceOp::Kind::min, ReduceOp::Kind::avg};
  FakeComm& c = comm_of(comm);
  const auto index = static_cast<std::size_t>(op);
  if (index < ncclNumOps) {
    part.op.kind = kKinds[index];
  } else {
    const auto lock = fake_lock();
    const auto& [made, exists] = c.ops.at(index - ncclNumOps);
    if (!exists) return refuse("a reduce operation that is gone");
    part.op = made;
  }
  count_symmetric(c, part);
  if (between_windows(c, part) && part.kind != Contribution::Kind::all_gather) part.offset = find_offset(c, part.in, 1);
  return enter({.comm = &c, .stream = stream, .collective = part});
}

ncclResult_t message(void* data, std::size_t count, ncclDataType_t type, int peer, bool sends, ncclComm_t comm,
                     cudaStream_t stream) {
  auto made = std::make_shared<Message>(Message{data, count * base::size_of(dtype_of_vendor(type))});
  return enter({.comm = &comm_of(comm), .stream = stream, .message = std::move(made), .sends = sends, .peer = peer});
}

ncclResult_t make_op(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                     ncclComm_t comm) {
  const auto lock = fake_lock();
  if (residence != ncclScalarHostImmediate) return refuse("a scalar of the device");
  double factor = 0;
  conformance::with_type(dtype_of_vendor(type), [&](auto zero) {
    std::memcpy(&zero, scalar, sizeof(zero));
    factor = static_cast<double>(static_cast<conformance::SumOf<decltype(zero)>>(zero));
  });
  auto& ops = comm_of(comm).ops;
  ops.emplace_back(ReduceOp::premul_sum(factor), true);
  ++fake_state().counts.reduce_ops;
  *op = static_cast<ncclRedOp_t>(static_cast<int>(ncclNumOps) + static_cast<int>(ops.size()) - 1);
  return ncclSuccess;
}

ncclResult_t drop_op(ncclRedOp_t op, ncclComm_t comm) {
  const auto lock = fake_lock();
  comm_of(comm).ops.at(static_cast<std::size_t>(op) - ncclNumOps).second = false;
  --fake_state().counts.reduce_ops;
  return ncclSuccess;
}

ncclResult_t make_id(ncclUniqueId* id) {
  static int next = 0;
  const auto lock = fake_lock();
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, &++next, sizeof(next));
  return ncclSuccess;
}

}  // namespace

void add_nccl(comm::nccl::NcclApi& api) {
  using Kind = Contribution::Kind;
  api.ncclGetVersion = [](int* version) {
    *version = fake_state().options.version;
    return ncclSuccess;
  };
  api.ncclGetErrorString = [](ncclResult_t result) {
    return result == ncclRemoteError ? "remote process exited or there was a network error" : "fake error";
  };
  api.ncclGetLastError = [](ncclComm_t) { return "the last error\nof the fake"; };
  api.ncclGetUniqueId = make_id;
  add_communicators(api);
  add_windows(api);
  api.ncclAllReduce = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                         ncclComm_t comm, cudaStream_t stream) {
    return collective({Kind::all_reduce, in, out, count, type}, op, comm, stream);
  };
  api.ncclAllGather = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                         cudaStream_t stream) {
    return collective({Kind::all_gather, in, out, count, type}, ncclSum, comm, stream);
  };
  api.ncclReduceScatter = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                             ncclComm_t comm, cudaStream_t stream) {
    return collective({Kind::reduce_scatter, in, out, count, type}, op, comm, stream);
  };
  api.ncclBroadcast = [](const void* in, void* out, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
    return collective({Kind::broadcast, in, out, count, type, {}, root}, ncclSum, comm, stream);
  };
  api.ncclReduce = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                      ncclComm_t comm, cudaStream_t stream) {
    return collective({Kind::reduce, in, out, count, type, {}, root}, op, comm, stream);
  };
  api.ncclSend = [](const void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream) {
    return message(const_cast<void*>(data), count, type, peer, true, comm, stream);
  };
  api.ncclRecv = [](void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream) { return message(data, count, type, peer, false, comm, stream); };
  api.ncclGroupStart = [] {
    ++group_depth;
    return ncclSuccess;
  };
  api.ncclGroupEnd = [] { return --group_depth == 0 ? launch() : ncclSuccess; };
  api.ncclRedOpCreatePreMulSum = make_op;
  api.ncclRedOpDestroy = drop_op;
  api.ncclMemAlloc = [](void** data, std::size_t bytes) {
    return fake_api().cudaMalloc(data, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  };
  api.ncclMemFree = [](void* data) {
    {
      const auto lock = fake_lock();
      if (fake_state().windows.contains(data)) return refuse("memory is freed while it is a window");
    }
    fake_api().cudaFree(data);
    return ncclSuccess;
  };
  api.ncclCommRegister = [](ncclComm_t comm, void* data, std::size_t, void** handle) {
    const auto lock = fake_lock();
    if (comm_of(comm).in_progress()) return refuse("a call on a communicator that is in progress");
    *handle = data;
    ++comm_of(comm).registrations;
    ++fake_state().counts.registrations;
    return ncclSuccess;
  };
  api.ncclCommDeregister = [](ncclComm_t comm, void*) {
    const auto lock = fake_lock();
    --comm_of(comm).registrations;
    --fake_state().counts.registrations;
    return ncclSuccess;
  };
}

const comm::nccl::NcclApi& fake_api() {
  static const comm::nccl::NcclApi kApi = [] {
    comm::nccl::NcclApi api;
    add_cuda(api);
    add_nccl(api);
    return api;
  }();
  return kApi;
}

void reset_fake(const FakeOptions& options) {
  const auto lock = fake_lock();
  FakeState& state = fake_state();
  state.options = options;
  state.counts = {};
  state.environment.clear();
  state.windows.clear();
  state.broken.clear();
  state.copy_engine_calls.clear();
  forget_worlds();
}

void change_fake(const FakeOptions& options) {
  const auto lock = fake_lock();
  fake_state().options = options;
}

FakeCounts fake_counts() {
  const auto lock = fake_lock();
  return fake_state().counts;
}

void break_link(int rank, ncclResult_t error) {
  const auto lock = fake_lock();
  fake_state().broken.insert(rank);
  fake_state().break_error = error;
}

}  // namespace tessera::nccl_test
