// Rendezvous through a store of the program, between threads that have their own connections, as processes do.
#include <gmock/gmock.h>

#include <condition_variable>
#include <map>
#include <mutex>

#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"
#include "tessera/comm/rendezvous_store.h"
#include "tests/comm/rendezvous.h"

namespace tessera::comm_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

class MapStore : public RendezvousStore {
 public:
  void set(const std::string& key, std::string_view value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::optional<std::string> get(const std::string& key, steady_clock::time_point until) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, until, [&] { return values_.count(key) != 0; })) return std::nullopt;
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// A rendezvous of all ranks by `store`; changed(options) may change the options of each rank.
std::vector<Outcome> by_store(int size, const std::shared_ptr<RendezvousStore>& store,
                              const std::function<void(RendezvousOptions&)>& changed = {}) {
  return rendezvous_all(size, 1, [&](RendezvousOptions& one) {
    one.master = one.token = "";
    one.store = store;
    if (changed) changed(one);
  });
}

void expect_exchange(const std::vector<Outcome>& all) {
  ASSERT_NO_FATAL_FAILURE(assert_complete(all));
  std::vector<std::future<std::vector<std::string>>> exchanged;
  for (const Outcome& one : all)
    exchanged.push_back(std::async(
        std::launch::async, [&] { return one.bootstrap->all_gather("rank" + std::to_string(one.bootstrap->rank())); }));
  std::vector<std::string> want;
  for (std::size_t r = 0; r < all.size(); ++r) want.push_back("rank" + std::to_string(r));
  for (auto& one : exchanged) EXPECT_EQ(one.get(), want);
}

void name_hosts(RendezvousOptions& one) { one.host_id = "host" + std::to_string(one.launch.rank); }

TEST(StoreRendezvous, ConnectsRanksOfOneHost) { expect_exchange(by_store(4, std::make_shared<MapStore>())); }

TEST(StoreRendezvous, ConnectsHosts) {
  const std::vector<Outcome> all = by_store(4, std::make_shared<MapStore>(), [](RendezvousOptions& one) {
    one.host_id = one.launch.rank < 2 ? "main land" : "island";
  });
  expect_exchange(all);
  for (const Outcome& one : all)
    EXPECT_EQ(one.bootstrap->hosts(), (std::vector<std::string>{"main land", "main land", "island", "island"}));
}

/// Publishes a socket that no process listens on.
class SocketlessStore final : public MapStore {
 public:
  void set(const std::string& key, std::string_view value) override {
    PublishedAddress address = PublishedAddress::parse(std::string(value));
    address.socket = "tessera-of-another-machine";
    MapStore::set(key, address.text());
  }
};

/// A cloned machine has the host name of rank 0's, but not its sockets.
TEST(StoreRendezvous, ReachesByTheNetworkAHostThatSeemsToBeTheOwn) {
  const std::vector<Outcome> all = by_store(3, std::make_shared<SocketlessStore>());
  expect_exchange(all);
  for (const Outcome& one : all)
    EXPECT_EQ(one.bootstrap->hosts(), std::vector<std::string>(3, all[0].bootstrap->hosts()[0])) << "they are on one";
}

/// No port is chosen twice, since the system chooses each one while it listens.
TEST(StoreRendezvous, ManyWorldsAtOnce) {
  std::vector<std::future<std::vector<Outcome>>> worlds;
  for (int i = 0; i < 20; ++i)
    worlds.push_back(std::async(std::launch::async, [] {
      return by_store(2, std::make_shared<MapStore>(),
                      [](RendezvousOptions& one) { one.host_id = "host" + std::to_string(one.launch.rank); });
    }));
  for (auto& world : worlds) assert_complete(world.get());
}

/// Successive worlds, and restarts, of one store.
TEST(StoreRendezvous, GenerationsDoNotMix) {
  const auto store = std::make_shared<MapStore>();
  for (std::uint32_t generation = 0; generation < 3; ++generation)
    expect_exchange(by_store(3, store, [&](RendezvousOptions& one) { one.launch.generation = generation; }));
}

/// A launcher that restarts the ranks may keep their store, in which the address of the start before still stands.
TEST(StoreRendezvous, NextStartIgnoresAddressOfTheOneBefore) {
  for (const bool one_host : {true, false}) {
    const auto store = std::make_shared<MapStore>();
    const auto option = [&](int rank) {
      RendezvousOptions one = options_of(rank, 2, 1);
      one.store = store;
      if (!one_host) name_hosts(one);
      return one;
    };
    for (int start = 0; start < 3; ++start) {
      auto early = come(option(1));
      std::this_thread::sleep_for(start == 0 ? 0ms : 200ms);
      auto late = come(option(0));
      std::vector<Outcome> all;
      all.push_back(late.get());
      all.push_back(early.get());
      expect_exchange(all);
    }
  }
}

TEST(StoreRendezvous, NamesMissingRanks) {
  const auto store = std::make_shared<MapStore>();
  RendezvousOptions one = options_of(1, 2, 1);
  one.store = store;
  one.timeout = 300ms;
  EXPECT_THAT(come(one).get().error, AllOf(StartsWith("Timeout: init: rank 1 of 2 found no rank 0 within 300ms"),
                                           HasSubstr("it has not published its address in the program's store")));
  one.launch.rank = 0;
  EXPECT_THAT(come(one).get().error, AllOf(StartsWith("Timeout: "), HasSubstr("rank 1")));
}

/// Changes what rank 0 publishes.
class ForgingStore : public MapStore {
 public:
  explicit ForgingStore(std::function<std::string(std::string)> forge) : forge_(std::move(forge)) {}
  void set(const std::string& key, std::string_view value) override { MapStore::set(key, forge_(std::string(value))); }

 private:
  const std::function<std::string(std::string)> forge_;
};

/// Puts further addresses before those of rank 0.
std::shared_ptr<RendezvousStore> with_addresses(const std::vector<int>& ports) {
  return std::make_shared<ForgingStore>([ports](const std::string& text) {
    PublishedAddress address = PublishedAddress::parse(text);
    for (const int port : ports)
      address.places.insert(address.places.begin(), HostPort{"127.0.0.1", static_cast<std::uint16_t>(port)});
    return address.text();
  });
}

/// An address may belong to another network on the other host: nothing listens there, or a stranger that says nothing.
TEST(StoreRendezvous, TriesEachPublishedAddress) {
  expect_exchange(by_store(2, with_addresses({free_port(), free_port()}), name_hosts));
  const UniqueFd silent = listen_on_port(0);
  expect_exchange(by_store(2, with_addresses({port_of(silent)}), name_hosts));
}

TEST(StoreRendezvous, RefusesRanksWithAnotherSecret) {
  const auto store = std::make_shared<ForgingStore>([](const std::string& text) {
    PublishedAddress address = PublishedAddress::parse(text);
    address.token[0] ^= 1;
    return address.text();
  });
  for (const Outcome& one : by_store(2, store, [](RendezvousOptions& each) { each.timeout = 3s; }))
    EXPECT_NE(one.error, "");
}

TEST(StoreRendezvous, ReportsStoreThatHasSomethingElse) {
  const auto store = std::make_shared<ForgingStore>([](const std::string&) { return "http://example.org"; });
  const std::vector<Outcome> all = by_store(2, store, [](RendezvousOptions& one) { one.timeout = 500ms; });
  EXPECT_EQ(all[1].error, "SystemError: init: the store has http://example.org where rank 0 publishes its address");
}

TEST(StoreRendezvous, InitUsesStore) {
  const auto store = std::make_shared<MapStore>();
  std::vector<std::future<float>> sums;
  for (int r = 0; r < 3; ++r)
    sums.push_back(std::async(std::launch::async, [&, r] {
      InitOptions options = quick_config();
      options.backend = "tcp";
      options.launch = Launch{.launcher = "program", .rank = r, .size = 3, .local_size = 3, .job = ""};
      options.store = store;
      const auto world = init(options);
      float x = static_cast<float>(world->rank() + 1);
      world->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
      return x;
    }));
  for (auto& sum : sums) EXPECT_EQ(sum.get(), sum_of_ranks(3));
  InitOptions both = quick_config();
  both.launch = Launch{.launcher = "program", .rank = 0, .size = 2, .job = ""};
  both.store = store;
  both.master = "localhost:1";
  EXPECT_THAT(error_of([&] { init(both); }),
              StartsWith("InvalidUsage: init: options have a store as well as a master"));
}

TEST(MakeWorld, ConnectsRanksOfBootstrap) {
  std::vector<std::future<float>> sums;
  for (const auto& bootstrap : make_thread_bootstraps(2, 20s))
    sums.push_back(std::async(std::launch::async, [bootstrap] {
      const auto world = make_world(bootstrap, quick_config());
      float x = static_cast<float>(world->rank() + 1);
      world->all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
      return x;
    }));
  for (auto& sum : sums) EXPECT_EQ(sum.get(), sum_of_ranks(2));
}

}  // namespace
}  // namespace tessera::comm_test
