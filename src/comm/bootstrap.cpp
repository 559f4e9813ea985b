#include "tessera/comm/bootstrap.h"

#include <unistd.h>

#include <utility>

#include "tessera/base/error.h"

namespace tessera::comm {

UniqueFd::UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void UniqueFd::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0) ::close(fd);
}

int UniqueFd::release() noexcept { return std::exchange(fd_, -1); }

Bootstrap::~Bootstrap() = default;
ControlChannel::~ControlChannel() = default;

std::vector<std::shared_ptr<void>> Bootstrap::exchange_objects(std::shared_ptr<void>) {
  throw Unsupported("bootstrap: these ranks are not threads of one process");
}

std::vector<UniqueFd> Bootstrap::exchange_descriptors(int) {
  throw Unsupported("bootstrap: these ranks don't share a host");
}

void require_one_host(const Bootstrap& bootstrap, std::string_view what, std::string_view advice) {
  const std::vector<std::string>& hosts = bootstrap.hosts();
  for (std::size_t r = 1; r < hosts.size(); ++r) {
    if (hosts[r] == hosts[0]) continue;
    throw InvalidUsage(std::string(what) + " needs all ranks on one host: rank " + std::to_string(r) + " is on host " +
                       hosts[r] + ", rank 0 on " + hosts[0] + std::string(advice));
  }
}

}  // namespace tessera::comm
