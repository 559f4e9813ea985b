#include "tessera/comm/bootstrap/thread_bootstrap.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/base/thread.h"
#include "tessera/comm/bootstrap/hmac.h"

namespace tessera::comm {

namespace {

/// One rank's thread for receiving messages from the others.
class Mailbox {
 public:
  explicit Mailbox(std::function<void(int, std::string_view)> handler)
      : handler_(std::move(handler)), thread_(base::start_thread([this] { run(); })) {}
  ~Mailbox() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void put(int from, std::string_view message) {
    const std::lock_guard lock(mutex_);
    letters_.emplace_back(from, message);
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !letters_.empty(); });
      if (closed_) return;
      const auto [from, message] = std::move(letters_.front());
      letters_.pop_front();
      lock.unlock();
      if (handler_) handler_(from, message);
      lock.lock();
    }
  }

  const std::function<void(int, std::string_view)> handler_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int, std::string>> letters_;
  bool closed_ = false;
  std::thread thread_;
};

/// The mailboxes of all ranks on one channel; empty before a rank has opened it and after it has closed it.
struct MailboxSet {
  explicit MailboxSet(int ranks) : of(static_cast<std::size_t>(ranks)) {}
  std::mutex mutex;
  std::vector<std::unique_ptr<Mailbox>> of;
};

class ThreadChannel final : public ControlChannel {
 public:
  ThreadChannel(std::shared_ptr<MailboxSet> boxes, int rank)
      : boxes_(std::move(boxes)), rank_(static_cast<std::size_t>(rank)) {}
  ~ThreadChannel() override {
    std::unique_ptr<Mailbox> own;  // destroyed outside the lock, since its handler may be sending
    const std::lock_guard lock(boxes_->mutex);
    own = std::move(boxes_->of[rank_]);
  }
  void send(int to, std::string_view message) noexcept override {
    const std::lock_guard lock(boxes_->mutex);
    for (std::size_t r = 0; r < boxes_->of.size(); ++r)
      if (r != rank_ && (to == kAll || static_cast<std::size_t>(to) == r) && boxes_->of[r] != nullptr)
        boxes_->of[r]->put(static_cast<int>(rank_), message.substr(0, kMaxMessage));
  }

 private:
  const std::shared_ptr<MailboxSet> boxes_;
  const std::size_t rank_;
};

}  // namespace

/// A reusable barrier that carries one value per rank.
class ThreadBootstrap::Hub {
 public:
  struct Item {
    std::string blob;
    std::shared_ptr<void> object;
  };
  Hub(int ranks, std::chrono::milliseconds timeout) : items_(static_cast<std::size_t>(ranks)), timeout_(timeout) {}
  int size() const { return static_cast<int>(items_.size()); }
  const Bootstrap::Token& token() const { return token_; }

  std::vector<Item> exchange(int rank, Item item) {
    std::unique_lock lock(mutex_);
    const auto deadline = base::deadline_after(timeout_);
    // The previous round's values stay until every rank has read them.
    wait(lock, deadline, [&] { return leaving_ == 0; });
    items_[static_cast<std::size_t>(rank)] = std::move(item);
    const std::uint64_t round = round_;
    if (++arrived_ == size()) {
      arrived_ = 0;
      leaving_ = size();
      ++round_;
      changed_.notify_all();
    }
    wait(lock, deadline, [&] { return round_ != round; });
    std::vector<Item> all = items_;
    if (--leaving_ == 0) {
      for (Item& used : items_) used = {};
      changed_.notify_all();
    }
    return all;
  }

  void abandon() noexcept {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    changed_.notify_all();
  }

 private:
  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point deadline, Condition reached) {
    const bool in_time = changed_.wait_until(lock, deadline, [&] { return abandoned_ || reached(); });
    if (reached()) return;
    if (abandoned_) throw Aborted("init: another rank failed while the world was set up");
    if (!in_time) throw Timeout("init: not all ranks joined within " + format_duration(timeout_));
  }

  const Bootstrap::Token token_ = random_digest();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Item> items_;
  const std::chrono::milliseconds timeout_;
  int arrived_ = 0;
  int leaving_ = 0;
  std::uint64_t round_ = 0;
  bool abandoned_ = false;
};

ThreadBootstrap::ThreadBootstrap(std::shared_ptr<Hub> hub, int rank)
    : hub_(std::move(hub)), rank_(rank), hosts_(static_cast<std::size_t>(hub_->size()), "here") {}
const Bootstrap::Token& ThreadBootstrap::token() const noexcept { return hub_->token(); }
int ThreadBootstrap::size() const noexcept { return hub_->size(); }
void ThreadBootstrap::abandon() noexcept { hub_->abandon(); }

std::vector<std::string> ThreadBootstrap::all_gather(std::string_view blob) {
  std::vector<std::string> blobs;
  for (Hub::Item& item : hub_->exchange(rank_, {std::string(blob), nullptr})) blobs.push_back(std::move(item.blob));
  return blobs;
}

std::vector<std::shared_ptr<void>> ThreadBootstrap::all_gather_objects(std::shared_ptr<void> object) {
  std::vector<std::shared_ptr<void>> objects;
  for (Hub::Item& item : hub_->exchange(rank_, {{}, std::move(object)})) objects.push_back(std::move(item.object));
  return objects;
}

std::unique_ptr<ControlChannel> ThreadBootstrap::open_channel(std::string_view, ControlEvents events) {
  const auto created = rank_ == 0 ? std::make_shared<MailboxSet>(size()) : nullptr;
  const auto boxes = std::static_pointer_cast<MailboxSet>(all_gather_objects(created).front());
  {
    const std::lock_guard lock(boxes->mutex);
    boxes->of[static_cast<std::size_t>(rank_)] = std::make_unique<Mailbox>(std::move(events.message));
  }
  all_gather({});  // no rank sends before all can receive
  return std::make_unique<ThreadChannel>(boxes, rank_);
}

std::vector<std::shared_ptr<ThreadBootstrap>> make_thread_bootstraps(int ranks, std::chrono::milliseconds timeout) {
  const auto hub = std::make_shared<ThreadBootstrap::Hub>(ranks, timeout);
  std::vector<std::shared_ptr<ThreadBootstrap>> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(std::make_shared<ThreadBootstrap>(hub, rank));
  return all;
}

}  // namespace tessera::comm
