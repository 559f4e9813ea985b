// A complete backend as an external plug-in: the ranks are threads of one process, and messages lie in queues between
// them. It only implements the link, which moves active messages and bulk data between ranks (tessera/comm/link.h); tag
// matching, the collectives, deadlines and errors are the library's.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/host_communicator.h"
#include "tessera/comm/plugin.h"
#include "tessera/comm/tag_matching_transport.h"

namespace {

using namespace tessera::comm;

struct Am {
  AmHeader header;
  std::vector<std::byte> payload;
};

/// Bulk data that a sender has published. Removing it from the list claims it: for the receiver to copy it, for the
/// sender to cancel it.
struct BulkSend {
  Message* message;
  int from;
  std::uint64_t slot;
};

/// Incoming messages of one rank. Shared by all ranks: the mutex guards everything.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Am> ams;
  std::vector<BulkSend> sends;
  std::vector<Message*> taken;  ///< this rank's own messages that receivers have copied
  bool woken = false;
};

class QueueLink final : public Link, private ProgressWaiter {
 public:
  QueueLink(Bootstrap& bootstrap, LinkEvents& events) : events_(events), rank_(bootstrap.rank()) {
    for (const auto& object : bootstrap.all_gather_objects(std::make_shared<Mailbox>()))
      boxes_.push_back(std::static_pointer_cast<Mailbox>(object));
  }

  std::size_t longest_payload() const noexcept override { return 4096; }
  bool can_send_eager() const noexcept override { return true; }

  void send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept override {
    put(peer, [&](Mailbox& box) { box.ams.push_back({header, {payload.begin(), payload.end()}}); });
  }
  void send_bulk(Message& message, std::uint64_t slot) noexcept override {
    put(message.peer, [&](Mailbox& box) { box.sends.push_back({&message, rank_, slot}); });
  }
  void receive_bulk(Message& message, std::uint64_t slot) noexcept override {
    wanted_.push_back({&message, message.peer, slot});
  }

  CancelResult cancel_bulk(Message& message) noexcept override {
    const auto is_it = [&](const BulkSend& send) { return send.message == &message; };
    if (std::erase_if(wanted_, is_it) > 0) return CancelResult::not_started;
    Mailbox& theirs = box(message.peer);
    {
      const std::lock_guard lock(theirs.mutex);
      if (std::erase_if(theirs.sends, is_it) > 0) return CancelResult::not_started;
    }
    std::unique_lock lock(own().mutex);  // the receiver is copying now: wait for its end
    const auto copied = [&] {
      return std::find(own().taken.begin(), own().taken.end(), &message) != own().taken.end();
    };
    own().changed.wait(lock, copied);
    std::erase(own().taken, &message);
    return CancelResult::completed;
  }

  bool poll(bool) noexcept override {
    std::deque<Am> ams;
    std::vector<Message*> taken;
    {
      const std::lock_guard lock(own().mutex);
      ams.swap(own().ams);
      taken.swap(own().taken);
    }
    for (const Am& am : ams) events_.on_am(am.header, am.payload);
    for (Message* message : taken) events_.bulk_done(*message);
    bool moved = !ams.empty() || !taken.empty();
    for (std::size_t i = 0; i < wanted_.size();) moved |= complete_receive(i);
    return moved;
  }

  ProgressWaiter& waiter() noexcept override { return *this; }
  void close(CloseMode) noexcept override {}

 private:
  Mailbox& box(int rank) { return *boxes_[static_cast<std::size_t>(rank)]; }
  Mailbox& own() { return box(rank_); }

  template <class Change>
  void put(int rank, Change change) noexcept {
    Mailbox& to = box(rank);
    {
      const std::lock_guard lock(to.mutex);
      change(to);
    }
    to.changed.notify_all();
  }

  /// Copies the data that `wanted_[i]` waits for, if it is present; otherwise advances `i`.
  bool complete_receive(std::size_t& i) noexcept {
    const BulkSend want = wanted_[i];
    BulkSend found{};
    {
      const std::lock_guard lock(own().mutex);
      auto& sends = own().sends;
      const auto at = std::ranges::find_if(
          sends, [&](const BulkSend& send) { return send.from == want.from && send.slot == want.slot; });
      if (at == sends.end()) return ++i, false;
      found = *at;
      sends.erase(at);
    }
    wanted_.erase(wanted_.begin() + static_cast<std::ptrdiff_t>(i));
    std::memcpy(want.message->data, found.message->data, want.message->bytes);
    put(want.from, [&](Mailbox& sender) { sender.taken.push_back(found.message); });
    events_.bulk_done(*want.message);
    return true;
  }

  bool arm() noexcept override {
    const std::lock_guard lock(own().mutex);
    own().woken = false;
    return own().ams.empty() && own().taken.empty() && own().sends.empty();
  }
  void sleep(std::chrono::nanoseconds at_most) noexcept override {
    std::unique_lock lock(own().mutex);
    own().changed.wait_for(lock, std::min<std::chrono::nanoseconds>(at_most, std::chrono::milliseconds(10)), [&] {
      return own().woken || !own().ams.empty() || !own().taken.empty() || !own().sends.empty();
    });
  }
  void wake() noexcept override {
    put(rank_, [](Mailbox& box) { box.woken = true; });
  }

  LinkEvents& events_;
  const int rank_;
  std::vector<std::shared_ptr<Mailbox>> boxes_;
  std::vector<BulkSend> wanted_;  ///< posted receives of bulk data; `from` is the sender
};

std::unique_ptr<Communicator> create(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  if (!bootstrap->in_process())
    throw tessera::base::InvalidUsage(
        "queue: its ranks must be threads of one process; use another backend for processes");
  return make_host_communicator(std::move(bootstrap), options, "queue",
                                [](Bootstrap& ranks, TransportEvents& transport_events, const BackendOptions&) {
                                  return std::make_unique<TagMatchingTransport>(
                                      ranks, transport_events,
                                      [&](LinkEvents& events) { return std::make_unique<QueueLink>(ranks, events); });
                                });
}

const Backend& backend() {
  static const Backend kBackend{
      .name = "queue", .devices = "cpu", .probe = [] { return std::string(); }, .create = create, .variables = {}};
  return kBackend;
}

}  // namespace

TESSERA_PLUGIN(backend)
