// The file by which the ranks of a job on one host find rank 0.
#pragma once

#include <optional>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap/hmac.h"

namespace tessera::comm {

struct RendezvousAddress {
  std::string socket;  ///< abstract name of a Unix socket
  Digest token;
};

/// The file of a job: one for each user and name, readable by that user only.
std::string rendezvous_file_path(const std::string& job);

/// Empty if there is none. Throws SystemError if the file doesn't belong to this user.
std::optional<RendezvousAddress> read_rendezvous_file(const std::string& path);

/// Removes files of this user's processes that died during the rendezvous: only files whose process would be visible to
/// this one and no longer exists. Doesn't throw.
/// from here, and is gone. Throws nothing.
TESSERA_API void remove_dead_rendezvous_files() noexcept;

/// A job file, which exists as long as this object. Replaces the file of a dead process; throws InvalidUsage for that
/// of a living one.
class RendezvousFile {
 public:
  RendezvousFile(std::string job, const RendezvousAddress& address);
  ~RendezvousFile();
  RendezvousFile(const RendezvousFile&) = delete;
  RendezvousFile& operator=(const RendezvousFile&) = delete;

 private:
  const std::string path_;
};

}  // namespace tessera::comm
