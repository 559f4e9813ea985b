// Where the ranks of a job on one host look for rank 0.
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
std::string job_file_path(const std::string& job);

/// Nothing while there is none. Throws SystemError where it is not this user's own.
std::optional<RendezvousAddress> read_job_file(const std::string& path);

/// Removes what processes of this user have left that died while their ranks met: only files whose process would be seen
/// from here, and is gone. Throws nothing.
TESSERA_API void remove_dead_job_files() noexcept;

/// Exists as long as the object. One that a dead process left is replaced; one of a living process is InvalidUsage.
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
