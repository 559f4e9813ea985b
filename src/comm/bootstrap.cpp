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

}  // namespace tessera::comm
