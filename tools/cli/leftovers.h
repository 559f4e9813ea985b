// Removes files that killed ranks leave behind.
#pragma once

namespace tessera::tools {

/// Removes the rendezvous files of this user's dead processes, and the shared-memory segments that the MPI and UCX
/// libraries created under this user and that no process has open or mapped any more. Keeps all of them if their use
/// can't be determined: if a process of this user can't be inspected, or if there may be processes that are not visible
/// here. Throws nothing.
void remove_leftovers() noexcept;

}  // namespace tessera::tools
