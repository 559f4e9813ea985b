// The tree that carries the control channels of a large world.

#include <map>
#include <set>
#include <thread>

#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/control_plane.h"
#include "tessera/comm/bootstrap/secure_stream.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"
#include "tests/comm/control_ranks.h"
#include "tests/comm/rendezvous.h"

namespace tessera::comm_test {
namespace {

TEST(ControlTree, EveryRouteFollowsTheConnections) {
  for (const int fan_out : {1, 2, 3, 8, 30})
    for (const int size : {1, 2, 3, 9, 10, 30, 74}) {
      const ControlTree tree{size, fan_out};
      std::set<std::pair<int, int>> connected;
      for (int r = 0; r < size; ++r)
        for (int child = tree.first_child(r); child < tree.first_child(r + 1); ++child) {
          EXPECT_EQ(tree.parent(child), r);
          EXPECT_TRUE(connected.insert({r, child}).second && connected.insert({child, r}).second);
        }
      EXPECT_EQ(connected.size(), 2 * static_cast<std::size_t>(size - 1)) << "every rank but one has a parent";
      for (int from = 0; from < size; ++from)
        for (int to = 0; to < size; ++to) {
          std::vector<int> route = tree.route(from, to);
          EXPECT_LE(route.size(), connected.size());
          if (from == to) {
            EXPECT_TRUE(route.empty());
            continue;
          }
          EXPECT_EQ(tree.next_hop(from, to), route.empty() ? to : route.front());
          route.insert(route.begin(), from);
          route.push_back(to);
          EXPECT_EQ(std::set(route.begin(), route.end()).size(), route.size()) << "a circle";
          for (std::size_t i = 1; i < route.size(); ++i) EXPECT_TRUE(connected.contains({route[i - 1], route[i]}));
        }
    }
}

TEST(ControlTree, StarIsTheTreeAroundRank0) {
  const ControlTree star{200, 200};
  EXPECT_TRUE(star.is_star());
  EXPECT_EQ(star.route(7, 9), std::vector<int>{0});
  EXPECT_EQ(star.route(0, 9), std::vector<int>());
  EXPECT_EQ(star.route(9, 0), std::vector<int>());
  const ControlTree tree{512, 8};
  EXPECT_FALSE(tree.is_star());
  EXPECT_EQ(tree.first_child(0), 1);
  EXPECT_EQ(tree.route(511, 73), (std::vector<int>{63, 7, 0, 1, 9}));
  EXPECT_EQ(tree.route(1, 10), std::vector<int>());
  EXPECT_EQ((ControlTree{2'000'000'000, 2'000'000'000}.first_child(1'999'999'999)), 2'000'000'000) << "no overflow";
}

/// 0 has 1 and 2; 1 has 3 and 4; 2 has 5 and 6.
void send_between_all(bool master) {
  std::vector<Process> ranks = start_ranks({7, "2", master});
  for (std::size_t from = 0; from < ranks.size(); ++from)
    for (std::size_t to = 0; to < ranks.size(); ++to) {
      if (from == to) continue;
      const std::string text = std::to_string(from) + "to" + std::to_string(to);
      ranks[from].say("tell " + std::to_string(to) + " " + text);
      EXPECT_EQ(ranks[to].line(), "told test " + std::to_string(from) + " 4 " + text);
    }
  for (std::size_t from = 0; from < ranks.size(); ++from) {
    ranks[from].say("tell -1 all");
    for (std::size_t to = 0; to < ranks.size(); ++to)
      EXPECT_EQ(ranks[to].line(to == from ? 50ms : 20s),
                to == from ? "" : "told test " + std::to_string(from) + " 3 all");
  }
}
TEST(ControlTree, MessagesReachEveryRankOnceOnOneHost) { send_between_all(false); }
TEST(ControlTree, MessagesReachEveryRankOnceAcrossHosts) { send_between_all(true); }

TEST(ControlTree, AllSurvivorsLearnOfAnInnerRanksDeath) {
  for (const bool master : {false, true}) {
    std::vector<Process> ranks = start_ranks({7, "2", master});
    ranks[1].kill(SIGKILL);
    for (const std::size_t r : {0, 2, 3, 4, 5, 6}) EXPECT_EQ(ranks[r].line(), "lost 1 on test") << "rank " << r;
    ranks[5].say("tell 6 still");  // in the part around rank 0
    EXPECT_EQ(ranks[6].line(), "told test 5 5 still");
    ranks[3].say("tell 5 gone");  // cut off
    for (const std::size_t r : {0, 2, 3, 4, 5, 6}) EXPECT_EQ(ranks[r].line(300ms), "") << "rank " << r;
  }
}

TEST(ControlTree, DeathOfALeafReachesTheFarEnd) {
  std::vector<Process> ranks = start_ranks({7, "2"});
  ranks[6].say("fork");  // only its process ends
  EXPECT_EQ(ranks[6].line(), "forked");
  const auto start = steady_clock::now();
  ranks[6].kill(SIGKILL);
  for (std::size_t r = 0; r < 6; ++r) EXPECT_EQ(ranks[r].line(), "lost 6 on test") << "rank " << r;
  EXPECT_LT(steady_clock::now() - start, 1s);
}

/// A channel is open only when the ranks of all subtrees have opened it.
TEST(ControlTree, OpeningWaitsForEveryRank) {
  for (std::size_t last = 0; last < 7; ++last) {
    std::vector<Process> ranks = start_ranks({7, "2"});
    for (std::size_t r = 0; r < ranks.size(); ++r)
      if (r != last) ranks[r].say("open more");
    EXPECT_EQ(ranks[last == 0 ? 1 : 0].line(200ms), "") << "rank " << last << " has not";
    ranks[last].say("open more");
    for (Process& rank : ranks) EXPECT_EQ(rank.line(), "opened more");
  }
}

TEST(ControlTree, LeavingOfALeafIsNoLoss) {
  std::vector<Process> ranks = start_ranks({7, "2"});
  ranks[6].end_input();
  EXPECT_EQ(ranks[6].exit_code(), 0);
  for (std::size_t r = 0; r < 6; ++r) EXPECT_EQ(ranks[r].line(r == 0 ? 500ms : 50ms), "");
  ranks[0].say("open more");
  EXPECT_EQ(ranks[0].line(), "PeerLost: init: control channel 'more' can't be opened: rank 6 has left");
}

int descriptors_of(Process& rank) {
  rank.say("count");
  int count = -1;
  EXPECT_EQ(std::sscanf(rank.line().c_str(), "has %d", &count), 1);
  return count;
}

TEST(ControlTree, RanksHaveFewDescriptors) {
  constexpr int kRanks = 24;
  for (const bool master : {false, true}) {
    int most = 0;
    for (Process& rank : start_ranks({kRanks, "2", master})) most = std::max(most, descriptors_of(rank));
    EXPECT_LT(most, 20);
  }
  std::vector<Process> star = start_ranks({kRanks, "0"});
  EXPECT_GT(descriptors_of(star[0]), kRanks) << "the control";
}

/// Rank 3 does not take part in the tree.
std::vector<std::string> errors_without_rank3(bool it_leaves) {
  const auto all_but_one = [](RendezvousOptions& one) {
    one.largest_star = one.launch.rank == 3 ? 128 : 1;
    one.tree_fan_out = 2;
    one.timeout = 2s;
  };
  std::vector<std::future<Outcome>> coming;
  const int port = free_port();
  std::vector<RendezvousOptions> options;
  for (int r = 0; r < 7; ++r) all_but_one(options.emplace_back(options_of(r, 7, port)));
  for (const RendezvousOptions& one : options) coming.push_back(come(one));
  Outcome three = coming[3].get();
  if (it_leaves) three.bootstrap.reset();
  std::vector<std::string> errors;
  for (std::size_t r = 0; r < 7; ++r)
    if (r != 3) errors.push_back(coming[r].get().error);
  return errors;
}

TEST(ControlTree, AllRanksNameTheOneThatIsMissing) {
  EXPECT_EQ(errors_without_rank3(false),
            std::vector<std::string>(6, "Timeout: init: rank 3 of 7 connected, but did not answer within 2s"));
  EXPECT_EQ(errors_without_rank3(true),
            std::vector<std::string>(6,
                                     "PeerLost: init: rank 3 of 7 was lost: init: another rank closed its "
                                     "connection while the world was set up"));
}

/// Ranks that are threads. Those that are `apart` claim different hosts and find no Unix socket of another rank.
class TreeRank final : public Bootstrap {
 public:
  TreeRank(std::shared_ptr<Bootstrap> real, bool apart) : real_(std::move(real)), apart_(apart) {
    for (int r = 0; r < size(); ++r) hosts_.push_back(apart ? std::to_string(r) : "one");
  }
  int rank() const noexcept override { return real_->rank(); }
  int size() const noexcept override { return real_->size(); }
  bool in_process() const noexcept override { return false; }
  std::vector<std::string> all_gather(std::string_view blob) override {
    std::vector<std::string> all = real_->all_gather(blob);
    for (std::string& one : all) {
      if (!apart_ || one.size() < 2 || one.starts_with('-')) continue;
      PublishedAddress address = PublishedAddress::parse(one.substr(1));
      address.socket = "tessera-nowhere";
      one = "+" + address.text();
    }
    return all;
  }
  std::unique_ptr<ControlChannel> open_channel(std::string_view, ControlEvents) override { return nullptr; }
  const std::vector<std::string>& hosts() const noexcept override { return hosts_; }
  const Token& token() const noexcept override { return real_->token(); }
  std::string local_address() const override { return "127.0.0.1"; }

 private:
  const std::shared_ptr<Bootstrap> real_;
  const bool apart_;
  std::vector<std::string> hosts_;
};

/// Connects a tree; changed(identity) may change the identity of each rank. Returns its connections, or its error.
std::vector<std::pair<std::vector<Connection>, std::string>> connect_all(
    const ControlTree& tree, bool apart, const std::function<void(RankIdentity&)>& changed) {
  std::vector<std::pair<std::vector<Connection>, std::string>> all(static_cast<std::size_t>(tree.size));
  std::vector<std::thread> threads;
  for (const std::shared_ptr<ThreadBootstrap>& real : make_thread_bootstraps(tree.size, 20s))
    threads.emplace_back([&, real] {
      TreeRank rank(real, apart);
      RankIdentity self{.rank = rank.rank(), .size = tree.size, .run = "a"};
      changed(self);
      auto& [links, error] = all[static_cast<std::size_t>(self.rank)];
      error = error_of([&] { links = connect_tree(rank, self, tree, steady_clock::now() + 4s); });
    });
  for (std::thread& thread : threads) thread.join();
  return all;
}

TEST(ControlTree, ConnectsNeighboursOnly) {
  const ControlTree tree{7, 2};
  const auto tls = std::make_shared<const TlsContext>(TlsContext::Files{});
  for (const auto& [apart, context] : {std::pair{false, decltype(tls){}}, {true, decltype(tls){}}, {true, tls}}) {
    auto all = connect_all(tree, apart, [&](RankIdentity& self) { self.tls = context; });
    for (int from = 0; from < 7; ++from) {
      auto& [links, error] = all[static_cast<std::size_t>(from)];
      ASSERT_EQ(error, "");
      for (int to = 0; to < 7; ++to) {
        Connection& link = links[static_cast<std::size_t>(to)];
        ASSERT_EQ(static_cast<bool>(link), tree.parent(from) == to || tree.parent(to) == from);
        if (!link) continue;
        EXPECT_EQ(own_address(link.fd()), apart ? "127.0.0.1" : "");
        link.send_frame(std::to_string(from), steady_clock::now() + 5s);
        Connection& other = all[static_cast<std::size_t>(to)].first[static_cast<std::size_t>(from)];
        EXPECT_EQ(other.receive_frame(steady_clock::now() + 5s), std::to_string(from));
      }
    }
  }
}

/// A rank that is there but does not reach its parent.
TEST(ControlTree, AllRanksNameTheOneThatDoesNotConnect) {
  for (const auto& [rank, error] : connect_all({7, 2}, false, [](RankIdentity& self) {
         if (self.rank == 4) self.run = "b";
       }))
    EXPECT_EQ(error,
              "Timeout: rank 1: init: rank 4 did not connect to this one, which forwards control messages, in time");
}

/// The ranks behind a stopped one can't reply either, and are not named.
TEST(ControlTree, StoppedInnerRankIsNamedAlone) {
  std::vector<Process> ranks = start_ranks({7, "2 tcp", true});
  for (const Process& rank : ranks) rank.say("");
  for (Process& rank : ranks) EXPECT_EQ(rank.line(), "sum 7");
  ranks[1].kill(SIGSTOP);
  for (const Process& rank : ranks) rank.say("");
  for (const std::size_t r : {0, 2, 3, 4, 5, 6}) {
    const std::string error = ranks[r].line();
    EXPECT_TRUE(error.starts_with("Timeout: all_reduce #2")) << error;
    EXPECT_NE(error.find("; rank 1 is not responding"), std::string::npos) << error;
    for (const int other : {0, 2, 3, 4, 5, 6})
      EXPECT_EQ(error.find("rank " + std::to_string(other)), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace tessera::comm_test
