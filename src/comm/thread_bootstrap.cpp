#include "tessera/comm/thread_bootstrap.h"

#include <condition_variable>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"

namespace tessera::comm {

/// A reusable barrier that carries one value per rank.
class ThreadBootstrap::Hub {
 public:
  struct Item {
    std::string blob;
    std::shared_ptr<void> object;
  };
  Hub(int ranks, std::chrono::milliseconds timeout) : items_(static_cast<std::size_t>(ranks)), timeout_(timeout) {}
  int size() const { return static_cast<int>(items_.size()); }

  std::vector<Item> exchange(int rank, Item item) {
    std::unique_lock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    // The previous round's values stay until everybody has taken them.
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
    if (abandoned_) throw Aborted("init: another rank gave up while the world was set up");
    if (!in_time) throw Timeout("init: not all ranks came within " + format_duration(timeout_));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Item> items_;
  const std::chrono::milliseconds timeout_;
  int arrived_ = 0;
  int leaving_ = 0;
  std::uint64_t round_ = 0;
  bool abandoned_ = false;
};

ThreadBootstrap::ThreadBootstrap(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
int ThreadBootstrap::size() const noexcept { return hub_->size(); }
void ThreadBootstrap::abandon() noexcept { hub_->abandon(); }

std::vector<std::string> ThreadBootstrap::exchange(std::string_view blob) {
  std::vector<std::string> blobs;
  for (Hub::Item& item : hub_->exchange(rank_, {std::string(blob), nullptr})) blobs.push_back(std::move(item.blob));
  return blobs;
}

std::vector<std::shared_ptr<void>> ThreadBootstrap::exchange_objects(std::shared_ptr<void> object) {
  std::vector<std::shared_ptr<void>> objects;
  for (Hub::Item& item : hub_->exchange(rank_, {{}, std::move(object)})) objects.push_back(std::move(item.object));
  return objects;
}

std::vector<std::shared_ptr<ThreadBootstrap>> make_thread_bootstraps(int ranks, std::chrono::milliseconds timeout) {
  const auto hub = std::make_shared<ThreadBootstrap::Hub>(ranks, timeout);
  std::vector<std::shared_ptr<ThreadBootstrap>> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(std::make_shared<ThreadBootstrap>(hub, rank));
  return all;
}

}  // namespace tessera::comm
