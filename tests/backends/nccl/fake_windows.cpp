// The fake's symmetric windows.
#include <algorithm>

#include "tests/backends/nccl/fake_comm.h"

namespace tessera::nccl_test {
namespace {

/// Collective: the call lasts until all ranks make it.
ncclResult_t begin_window(FakeComm& comm, std::size_t bytes) {
  const auto clique = comm.clique;
  const std::uint64_t round = comm.window_rounds++;
  std::map<int, std::size_t>& sizes = clique->windows[round];
  sizes[comm.rank] = bytes;
  if (std::any_of(sizes.begin(), sizes.end(), [&](const auto& one) { return one.second != bytes; }))
    return refuse("windows whose sizes differ");
  comm.ready = [clique, round] {
    return clique->windows[round].size() == static_cast<std::size_t>(clique->size) &&
           !fake_state().options.windows_hang;
  };
  return comm.start();
}

/// The first free place in the rank's table.
std::size_t first_gap(const FakeComm& comm, std::size_t bytes) {
  std::map<std::size_t, std::size_t> taken;  // bytes by offset
  for (const auto& [data, window] : comm.windows) taken[window.offset] = window.bytes;
  std::size_t offset = 0;
  for (const auto& [begin, length] : taken) {
    if (offset + bytes <= begin) break;
    offset = begin + length;
  }
  return offset;
}

ncclResult_t register_window(ncclComm_t handle, void* data, std::size_t bytes, void** window, int flags) {
  FakeComm& comm = comm_of(handle);
  ncclResult_t begun = ncclSuccess;
  {
    const auto lock = fake_lock();
    if (comm.in_progress()) return refuse("a call on a communicator that is in progress");
    if (flags != 1) return refuse("a window that is not symmetric");
    const FakeOptions& options = fake_state().options;
    if (options.fails_early && options.window_fails == comm.world_rank) return ncclSystemError;
    begun = begin_window(comm, bytes);
  }
  const ncclResult_t result = finish(comm, begun);
  const auto lock = fake_lock();
  if (result != ncclSuccess && result != ncclInProgress) return result;
  if (fake_state().options.window_fails == comm.world_rank) return ncclSystemError;
  if (fake_state().options.no_windows) return result;
  *window = data;
  const std::size_t offset = first_gap(comm, bytes);
  comm.windows[static_cast<const std::byte*>(data)] = {bytes, offset};
  fake_state().windows.insert(data);
  ++fake_state().counts.windows;
  ++fake_state().counts.windows_made;
  return result;
}

ncclResult_t deregister_window(ncclComm_t handle, void* window) {
  const auto lock = fake_lock();
  FakeComm& comm = comm_of(handle);
  if (comm.windows.erase(static_cast<const std::byte*>(window)) == 0) return refuse("a window that does not exist");
  fake_state().windows.erase(fake_state().windows.find(window));
  --fake_state().counts.windows;
  return ncclSuccess;
}

}  // namespace

std::optional<std::size_t> find_offset(const FakeComm& comm, const void* data, std::size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  for (const auto& [first, window] : comm.windows)
    if (begin >= first && begin + bytes <= first + window.bytes)
      return window.offset + static_cast<std::size_t>(begin - first);
  return std::nullopt;
}

void add_windows(comm::nccl::NcclApi& api) {
  api.ncclCommWindowRegister = register_window;
  api.ncclCommWindowDeregister = deregister_window;
}

}  // namespace tessera::nccl_test
