#include "tests/backends/nccl/fake_comm.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

namespace tessera::nccl_test {
namespace {

std::map<std::string, std::shared_ptr<Clique>>& worlds() {
  static std::map<std::string, std::shared_ptr<Clique>> all;
  return all;
}

/// Lets the calls of a communicator that is no longer in progress run on their streams.
ncclResult_t progress(FakeComm& comm) {
  if (comm.polls_left > 0) --comm.polls_left;
  if (comm.in_progress()) return ncclInProgress;
  for (auto& [stream, task] : comm.held) stream_of(stream).tasks.push_back(std::move(task));
  comm.held.clear();
  return ncclSuccess;
}

/// Counts a communicator that `made` represents, and whether it is blocking.
FakeComm* counted(FakeComm* made, const ncclConfig_t& config) {
  made->blocking = config.blocking != 0 && !fake_state().options.non_blocking;
  made->shares = config.splitShare != 0;
#ifdef NCCL_CTA_POLICY_ZERO
  made->zero_policy = config.CTAPolicy == NCCL_CTA_POLICY_ZERO;
#endif
  if (made->zero_policy) ++fake_state().counts.zero_policies;
  ++fake_state().counts.communicators;
  ++fake_state().counts.created;
  return made;
}

ncclResult_t init(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  FakeComm* made = nullptr;
  ncclResult_t begun = ncclSuccess;
  {
    const auto lock = fake_lock();
    enter_context();
    std::shared_ptr<Clique>& clique = worlds()[std::string(id.internal, sizeof(id.internal))];
    if (clique == nullptr) clique = std::make_shared<Clique>(size);
    ++clique->here;
    made =
        counted(new FakeComm{.clique = clique, .rank = rank, .world_rank = rank, .device = current_device()}, *config);
    made->ready = [clique] { return clique->here == clique->size && !fake_state().options.init_hangs; };
    __atomic_store_n(comm, handle_of(made), __ATOMIC_RELEASE);  // as NCCL does, before it waits for the other ranks
    begun = made->start();
  }
  const ncclResult_t result = finish(*made, begun);
  if (result != ncclSuccess) return result;
  const auto lock = fake_lock();
  made->created = true;
  return result;
}

/// The last rank to arrive creates the children.
void decide(SplitRound& round) {
  std::map<int, std::vector<std::pair<int, int>>> by_color;  // key and rank
  for (std::size_t r = 0; r < round.choices.size(); ++r) {
    if (!round.choices[r]) return;
    by_color[round.choices[r]->color].emplace_back(round.choices[r]->key, static_cast<int>(r));
  }
  round.ranks.resize(round.choices.size());
  for (auto& [color, members] : by_color) {
    std::sort(members.begin(), members.end());
    round.children[color] = std::make_shared<Clique>(static_cast<int>(members.size()));
    for (std::size_t i = 0; i < members.size(); ++i)
      round.ranks[static_cast<std::size_t>(members[i].second)] = static_cast<int>(i);
  }
}

ncclResult_t begin_split(FakeComm& parent, int color, int key, ncclComm_t* child, const ncclConfig_t& config) {
  const auto lock = fake_lock();
  if (parent.in_progress()) return refuse("a call on a communicator that is in progress");
  const auto clique = parent.clique;
  const std::uint64_t number = parent.splits++;
  SplitRound& round = clique->splits[number];
  round.choices.resize(static_cast<std::size_t>(clique->size));
  round.choices[static_cast<std::size_t>(parent.rank)] = SplitRound::Choice{color, key};
  decide(round);
  parent.ready = [clique, number] { return !clique->splits[number].ranks.empty(); };
  *child = nullptr;
  if (color != NCCL_SPLIT_NOCOLOR) {
    auto* const made = counted(new FakeComm{.world_rank = parent.world_rank, .device = parent.device}, config);
    made->created = true;
    if (parent.shares) {
      made->aborted = parent.aborted;
      ++fake_state().counts.shared;
    }
    made->ready = [made, color, clique, number, rank = static_cast<std::size_t>(parent.rank)] {
      SplitRound& all = clique->splits[number];
      if (all.ranks.empty()) return false;
      made->clique = all.children[color];
      made->rank = all.ranks[rank];
      return true;
    };
    made->start();
    *child = handle_of(made);
  }
  return parent.start();
}

ncclResult_t split(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  const ncclResult_t parent = finish(comm_of(comm), begin_split(comm_of(comm), color, key, child, *config));
  if (*child == nullptr || (parent != ncclSuccess && parent != ncclInProgress)) return parent;
  return finish(comm_of(*child), comm_of(*child).blocking ? ncclInProgress : parent);
}

ncclResult_t async_error(ncclComm_t comm, ncclResult_t* state) {
  const auto lock = fake_lock();
  FakeComm& c = comm_of(comm);
  if (fake_state().broken.contains(c.world_rank))
    *state = fake_state().break_error;
  else
    *state = c.blocking ? ncclSuccess : progress(c);
  return ncclSuccess;
}

void end(FakeComm& comm) {
  *comm.aborted = *comm.aborted || !comm.finalized;
  --fake_state().counts.communicators;
  if (!*comm.aborted && !comm.windows.empty()) fake_state().complain("a communicator is destroyed that has windows");
  fake_state().counts.registrations -= comm.registrations;  // they end with it
  fake_state().counts.windows -= static_cast<int>(comm.windows.size());
  for (const auto& [data, window] : comm.windows) fake_state().windows.erase(fake_state().windows.find(data));
  delete &comm;
}

/// Makes a creation return that waits for other ranks. It frees the communicator, so no other call may be in progress.
ncclResult_t abort(ncclComm_t comm) {
  const auto hangs = [] {
    const auto lock = fake_lock();
    return fake_state().options.abort_hangs;
  };
  while (hangs()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  FakeComm& c = comm_of(comm);
  const auto called = [&] {
    const auto lock = fake_lock();
    if (c.calls > 0 && !*c.aborted && c.created) fake_state().complain("an abort beside a call");
    *c.aborted = true;
    return c.calls > 0;
  };
  while (called()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  const auto lock = fake_lock();
  for (auto& [stream, task] : c.held) stream_of(stream).tasks.push_back(std::move(task));
  end(c);
  return ncclSuccess;
}

ncclResult_t revoke(ncclComm_t comm, int) {
  const auto lock = fake_lock();
  if (!fake_state().options.revokes) return ncclInternalError;
  ++fake_state().counts.revoked;
  comm_of(comm).revoked = true;
  return ncclSuccess;
}

ncclResult_t destroy(ncclComm_t comm) {
  const auto lock = fake_lock();
  FakeComm& c = comm_of(comm);
  if (!c.finalized || c.in_progress()) fake_state().complain("a communicator is destroyed before it is finalized");
  end(c);
  return ncclSuccess;
}

ncclResult_t finalize(ncclComm_t comm) {
  ncclResult_t begun = ncclSuccess;
  {
    const auto lock = fake_lock();
    comm_of(comm).finalized = true;
    if (fake_state().options.close_hangs) comm_of(comm).ready = [] { return !fake_state().options.close_hangs; };
    begun = comm_of(comm).start();
  }
  return finish(comm_of(comm), begun);
}

}  // namespace

ncclResult_t refuse(const std::string& why) {
  fake_state().complain(why);
  return ncclInvalidUsage;
}

ncclResult_t finish(FakeComm& comm, ncclResult_t begun) {
  {
    const auto lock = fake_lock();
    fake_state().counts.callers[comm.world_rank].insert(std::this_thread::get_id());
    if (begun != ncclInProgress || !comm.blocking) return begun;
    if (comm.calls++ > 0) fake_state().complain("two calls at once on a communicator");
  }
  while (true) {
    {
      const auto lock = fake_lock();
      const FakeOptions& options = fake_state().options;
      const bool stays = comm.finalized && options.close_hangs;
      const bool ends = ((*comm.aborted || comm.revoked) && !stays) || options.calls_end;
      const ncclResult_t state = ends ? ncclInternalError : progress(comm);
      if (state != ncclInProgress) {
        --comm.calls;
        return state;
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void forget_worlds() { worlds().clear(); }

void add_communicators(comm::nccl::NcclApi& api) {
  api.ncclCommInitRankConfig = init;
  api.ncclCommSplit = split;
  api.ncclCommGetAsyncError = async_error;
  api.ncclCommFinalize = finalize;
  api.ncclCommDestroy = destroy;
  api.ncclCommAbort = abort;
  api.ncclCommRevoke = revoke;
}

}  // namespace tessera::nccl_test
