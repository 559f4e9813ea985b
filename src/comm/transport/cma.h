// CMA: reads memory of another process on this host through the kernel (process_vm_readv, "cross-memory attach"). One
// copy instead of two through shared memory.
//
// CmaLink is a Link whose bulk transfers between ranks of one host use it: the receiver copies from the sender's
// process. The inner link carries everything else, including bulk so short that the system calls cost more than they
// save.
//
//   sender    CMA address  where the bytes lie, and where the send's number does
//   receiver               reads the bytes, then the number: if it is unchanged, they were read before the sender
//                          could cancel the message and its caller overwrite them
//   receiver  FIN
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/link.h"

namespace tessera::comm {

/// Returns the pid of each rank that supports CMA: it and this rank can read each other's memory, and both have
/// TESSERA_CMA on. 0 otherwise: on another host, if a container, a security module or ptrace_scope forbids it, across
/// pid namespaces, for this rank itself, and for all ranks if it is not `wanted` here. Determined by a trial read.
/// Collective; throws InvalidUsage and the bootstrap's errors.
TESSERA_API std::vector<int> cma_processes(Bootstrap& bootstrap, bool wanted = true);

/// Copies `bytes` from `from` in process `pid`, which is `rank`. False: that process is gone. Throws SystemError, which
/// names both and the remedy.
TESSERA_API bool cma_read(int pid, int rank, const void* from, void* to, std::size_t bytes);

class TESSERA_API CmaLink final : public Link, private LinkEvents {
 public:
  using Factory = std::function<std::unique_ptr<Link>(LinkEvents& events)>;
  /// `processes`: cma_processes().
  CmaLink(const Bootstrap& bootstrap, std::vector<int> processes, LinkEvents& events, const Factory& make_link);
  ~CmaLink() override;

  std::size_t longest_payload() const noexcept override { return link_->longest_payload(); }
  bool can_send_eager() const noexcept override { return link_->can_send_eager(); }
  void send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept override;
  void send_bulk(Message& message, std::uint64_t slot) noexcept override;
  void receive_bulk(Message& message, std::uint64_t slot) noexcept override;
  CancelResult cancel_bulk(Message& message) noexcept override;
  bool poll(bool with_health_check) noexcept override;
  ProgressWaiter& waiter() noexcept override { return link_->waiter(); }
  NativeCollectives* native() noexcept override { return link_->native(); }
  void close(CloseMode how) noexcept override { link_->close(how); }

 private:
  struct CmaSend;
  struct CmaReceive;

  void on_am(const AmHeader& header, std::span<const std::byte> payload) noexcept override;
  void bulk_done(Message& message) noexcept override { events_.bulk_done(message); }
  void bulk_failed(Message& message, const std::string& why) noexcept override { events_.bulk_failed(message, why); }
  void peer_lost(int peer, const std::string& why) noexcept override { events_.peer_lost(peer, why); }
  void link_failed(const std::string& why) noexcept override { events_.link_failed(why); }

  bool uses_cma(const Message& message) const noexcept;
  void start_receive(const AmHeader& header, std::span<const std::byte> payload) noexcept;
  void finish_send(int peer, std::uint64_t slot) noexcept;
  void release(CmaSend& send) noexcept;
  void release(CmaReceive& receive) noexcept;
  void read_some(CmaReceive& receive) noexcept;
  void send_fin(int peer, std::uint64_t slot) noexcept;
  /// True: they were read. False: the process or the memory is gone; see `why`.
  bool read(int peer, const void* from, void* to, std::size_t bytes, std::string& why) const noexcept;

  LinkEvents& events_;
  const int rank_;
  const std::uint32_t world_;
  const std::vector<int> processes_;
  std::uint64_t number_;                         ///< of the last send
  std::vector<std::unique_ptr<CmaSend>> sends_;  ///< all ever created, since peers may still read their numbers
  std::vector<CmaSend*> sent_;                   ///< in flight
  std::vector<CmaSend*> idle_sends_;
  std::vector<std::unique_ptr<CmaReceive>> receives_;
  std::size_t readable_ = 0;  ///< how many of `receives_` can be read
  const std::unique_ptr<Link> link_;
};

}  // namespace tessera::comm
