// Files that ranks leave behind where they are killed.
#pragma once

namespace tessera::tools {

/// Removes the rendezvous files of this user's dead processes, and the segments of shared memory that MPI's and UCX's
/// libraries made under this user and that no process has open or mapped any more. Leaves all of them where it can't tell:
/// where a process of this user can't be looked at, or where there may be processes that aren't seen from here. Throws
/// nothing.
void remove_leftovers() noexcept;

}  // namespace tessera::tools
