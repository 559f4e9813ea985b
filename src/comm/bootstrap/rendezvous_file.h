// The file by which the ranks of a job on one host find rank 0, and identifiers of the host and the pid namespace of
// this process.
#pragma once

#include <optional>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap/hmac.h"

namespace tessera::comm {

struct RendezvousAddress {
  std::string socket;  ///< abstract name of a Unix socket
  Digest token;
};

/// A directory that this user owns and no other can enter: /tmp/tessera-UID; or another one that begins with this,
/// if another user has taken the name; in /dev/shm where /tmp can't be written. Creates it if there is none. The
/// environment doesn't matter, since that of another rank may differ. Throws SystemError.
TESSERA_API std::string private_directory();
/// Removes such a directory if it is empty.
TESSERA_API void remove_private_directory(const std::string& path) noexcept;

/// The path that a job's file has, unless another user has taken the directory's name.
std::string usual_rendezvous_file(const std::string& job);

/// Looks for the job's file in all private directories. Empty if there is none. Throws SystemError if others can read
/// it.
std::optional<RendezvousAddress> read_rendezvous_file(const std::string& job);

/// Removes files of this user's processes that died during the rendezvous: only files whose process would be visible to
/// this one and no longer exists; and private directories that are empty. Doesn't throw.
TESSERA_API void remove_dead_rendezvous_files() noexcept;

/// A job file, which exists as long as this object. Replaces the file of a dead process; throws InvalidUsage for that
/// of a living one.
class RendezvousFile {
 public:
  RendezvousFile(const std::string& job, const RendezvousAddress& address);
  ~RendezvousFile();
  RendezvousFile(const RendezvousFile&) = delete;
  RendezvousFile& operator=(const RendezvousFile&) = delete;

 private:
  std::string directory_;
  std::string path_;
};

/// The running kernel and the network namespace: processes that share both can reach each other without a network.
TESSERA_API std::string host_identity();
/// Processes with equal values use the same pids.
std::string process_space();

}  // namespace tessera::comm
