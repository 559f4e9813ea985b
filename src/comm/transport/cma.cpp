#include "tessera/comm/transport/cma.h"

#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/env_variables.h"

namespace tessera::comm {
namespace {

/// A test address and its content, which differs in another process with the same pid.
struct Sample {
  pid_t pid = 0;
  int wanted = 0;
  const std::byte* place = nullptr;
  std::array<unsigned, 8> content = {};
};

bool is_readable(const Sample& sample) {
  decltype(sample.content) seen = {};
  iovec to{seen.data(), sizeof(seen)};
  iovec from{const_cast<std::byte*>(sample.place), sizeof(seen)};
  return ::process_vm_readv(sample.pid, &to, 1, &from, 1, 0) == static_cast<ssize_t>(sizeof(seen)) &&
         seen == sample.content;
}

}  // namespace

std::vector<int> cma_processes(Bootstrap& bootstrap, bool wanted) {
  const auto me = static_cast<std::size_t>(bootstrap.rank());
  const auto ranks = static_cast<std::size_t>(bootstrap.size());
  Sample own;
  own.pid = ::getpid();
  own.wanted = parse_flag(env_or_default(env::kCma), env::kCma.name) && wanted ? 1 : 0;
  std::random_device random;
  for (unsigned& word : own.content) word = random();
  own.place = reinterpret_cast<const std::byte*>(own.content.data());
  std::vector<int> processes(ranks, 0);
  std::string shown(ranks, '0');
  const std::vector<std::string> blobs = bootstrap.all_gather({reinterpret_cast<const char*>(&own), sizeof(own)});
  for (std::size_t r = 0; r < ranks; ++r) {
    Sample sample;
    if (blobs[r].size() != sizeof(sample))
      throw SystemError("rank " + std::to_string(r) + " runs another version of the library");
    std::memcpy(&sample, blobs[r].data(), sizeof(sample));
    if (r == me || bootstrap.hosts()[r] != bootstrap.hosts()[me]) continue;
    if (own.wanted == 0 || sample.wanted == 0 || !is_readable(sample)) continue;
    processes[r] = sample.pid;
    shown[r] = '1';
  }
  // Also keeps every rank here until the last one has read.
  const std::vector<std::string> readable = bootstrap.all_gather(shown);
  for (std::size_t r = 0; r < ranks; ++r)
    if (readable[r].size() != ranks || readable[r][me] != '1') processes[r] = 0;
  return processes;
}

bool cma_read(int pid, int rank, const void* from, void* to, std::size_t bytes) {
  while (bytes > 0) {
    iovec mine{to, bytes};
    iovec theirs{const_cast<void*>(from), bytes};
    const ssize_t n = ::process_vm_readv(pid, &mine, 1, &theirs, 1, 0);
    if (n < 0 && errno == ESRCH) return false;
    if (n <= 0)
      throw system_error("can't read the memory of rank " + std::to_string(rank) + " (process " + std::to_string(pid) +
                         "), as where it is a device's or secret, or the process has become undumpable; set "
                         "TESSERA_CMA=0 on all ranks");
    from = static_cast<const std::byte*>(from) + n;
    to = static_cast<std::byte*>(to) + n;
    bytes -= static_cast<std::size_t>(n);
  }
  // The kernel's loads are this thread's. They come before a load that tells whether the memory was still its owner's,
  // and before a message by which the owner gets it back.
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

}  // namespace tessera::comm
