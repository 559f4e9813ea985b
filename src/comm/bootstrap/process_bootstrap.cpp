#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/process_bootstrap.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr auto kVerdictTime = 2s;
constexpr auto kUnprovenTime = 1s;  // then answers without proof are logged
constexpr std::size_t kMaxSeen = 3;
constexpr int kRanksAtOnce = 16;  // whose descriptors are open
static_assert(kRanksAtOnce * Bootstrap::kMaxDescriptors <= Connection::kMaxDescriptors);

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

std::string damage(int from, int to) {
  return "init: a message from rank " + std::to_string(from) + " to rank " + std::to_string(to) +
         " is damaged or forged: its authentication code is wrong; check the network between the two, and start again";
}

}  // namespace

JoinResult connect_to_rank0(const RankIdentity& self, const JoinPlan& plan,
                            const std::function<Connection(std::string& why, Digest& key)>& connect) {
  const Digest instance = random_digest();
  const std::string name = "init: rank " + std::to_string(self.rank) + " of " + std::to_string(self.size);
  const std::string subject = plan.subject.empty() ? name + " found no rank 0" : plan.subject;
  std::string why = "no answer";
  std::vector<std::string> seen;  // the first reasons that answers gave
  bool tried = false;
  RankIdentity proven = self;
  std::optional<steady_clock::time_point> unproven_since;
  Logger* logger = plan.logger.get();  // null after the warning
  for (auto pause = 1ms; steady_clock::now() < plan.deadline; pause = std::min(pause * 2, 50ms)) {
    const std::string before = why;
    Connection connection = connect(why, proven.key);
    Attempt attempt;
    if (connection) {
      attempt = client_handshake(connection, proven, instance, plan.place, plan.deadline);
      if (attempt.admitted) return {std::move(connection), attempt.session, proven.key};
      why = std::move(attempt.why);
    }
    const auto now = steady_clock::now();
    if (tried && now >= plan.deadline) why = before;  // the last attempt was cut short: it knows less
    tried = true;
    if (connection && seen.size() < kMaxSeen && std::ranges::find(seen, why) == seen.end()) seen.push_back(why);
    if (attempt.unproven && !unproven_since) unproven_since = now;
    // One flipped bit looks the same, and so may a process that has briefly taken rank 0's port.
    if (attempt.unproven && now - *unproven_since >= kUnprovenTime && logger != nullptr)
      std::exchange(logger, nullptr)
          ->write(LogLevel::warn, name + " waits for rank 0 " + plan.about + ": " + plan.place + ": " + why);
    std::this_thread::sleep_for(std::min<steady_clock::duration>(pause, plan.deadline - now));
  }
  std::erase(seen, why);
  for (const std::string& one : seen) why += (&one == seen.data() ? "; before: " : "; ") + one;
  throw Timeout(subject + " " + plan.about + ": " + plan.place + ": " + why);
}

/// The first message that the ranks exchange.
struct ProcessBootstrap::PeerLocation {
  std::string processes;
  int pid = 0;
  std::string address;  ///< "" for a Unix socket
  std::string host;
  std::string apart;  ///< tells the hosts of that name apart; not part of the message

  std::string text() const {
    return processes + " " + std::to_string(pid) + " " + (address.empty() ? "-" : address) + " " + host;
  }
  static PeerLocation parse(const std::string& text) {
    PeerLocation one;
    std::istringstream fields(text);
    fields >> one.processes >> one.pid >> one.address;
    if (!fields || fields.get() != ' ') throw SystemError("init: another rank sent an invalid address");
    if (one.address == "-") one.address.clear();
    std::getline(fields, one.host, '\0');
    return one;
  }
};

ProcessBootstrap::ProcessBootstrap(StarSockets parts)
    : self_(std::move(parts.self)),
      token_(world_token(self_, parts.session)),
      tree_(parts.tree),
      deadline_(parts.deadline),
      timeout_(parts.timeout),
      context_(std::move(parts.context)),
      server_(std::move(parts.server)),
      links_(std::move(parts.links)) {
  introduce(parts.host_id);
  if (!tree_.is_star()) tree_links_ = connect_tree(*this, self_, tree_, deadline_);
}

ProcessBootstrap::~ProcessBootstrap() = default;

/// Cloned machines have equal identities, and a TESSERA_HOST_ID may be that of another host. Only ranks in one network
/// namespace reach each other by Unix sockets; those that say so but don't get different host names. The ranks that are
/// connected with rank 0 by such a socket listen at none.
void ProcessBootstrap::separate_hosts(std::vector<PeerLocation>& all,
                                      const std::function<std::string(int rank)>& socket_of) {
  const PeerLocation& own = all[index(rank())];
  int first = own.address.empty() ? 0 : rank();  // on this rank's host, really
  for (int r = 0; r < first; ++r)
    if (all[index(r)].host == own.host && !all[index(r)].address.empty() && is_listened_on(socket_of(r))) first = r;
  const std::vector<std::string> firsts = all_gather(std::to_string(first));
  std::map<std::string, std::set<std::string>> firsts_of;
  for (int r = 0; r < size(); ++r) firsts_of[all[index(r)].host].insert(firsts[index(r)]);
  for (int r = 0; r < size(); ++r)
    if (PeerLocation& one = all[index(r)]; firsts_of[one.host].size() > 1)
      one.apart = " (rank " + firsts[index(r)] + "'s)";
}

void ProcessBootstrap::introduce(const std::string& host_id) {
  const PeerLocation own{process_space(), ::getpid(), link_address(), host_id.empty() ? host_identity() : host_id};
  const auto door = [this](int rank) {
    return "tessera-" + to_hex(prove(token_, "door" + std::to_string(rank))).substr(0, 32);
  };
  const UniqueFd listener = own.address.empty() ? UniqueFd() : listen_on(door(rank()));
  std::vector<PeerLocation> all;
  for (const std::string& text : all_gather(own.text())) all.push_back(PeerLocation::parse(text));
  if (!all[0].address.empty()) separate_hosts(all, door);
  for (const PeerLocation& one : all) {
    hosts_.push_back(one.host + one.apart);
    pids_.push_back(one.processes == own.processes ? one.pid : 0);
  }
  local_address_ = own.address.empty() ? "127.0.0.1" : own.address;
  const bool one_host = std::equal(hosts_.begin() + 1, hosts_.end(), hosts_.begin());
  if (one_host && !own.address.empty())
    local_address_ = own.address.find(':') == std::string::npos ? "127.0.0.1" : "::1";
  // On rank 0's own host the address may be a loopback address, which other hosts can't use.
  if (!one_host && is_loopback(local_address_) && !all[0].address.empty()) local_address_ = all[0].address;
}

/// Rank 0: the address at which others reach it; a loopback address only if there is no other.
std::string ProcessBootstrap::link_address() const {
  std::string address;
  for (const Connection& link : links_) {
    if (!link) continue;
    const std::string own = own_address(link.fd());
    if (own.empty()) continue;  // a Unix socket
    if (address.empty() || is_loopback(address)) address = own;
  }
  return address;
}

template <class F>
void ProcessBootstrap::each_peer(std::vector<Connection>& links, F&& call) {
  int r = 1;
  const auto refuse_others = [&](const Error& error, bool to_it_too) {
    for (int other = 1; other < size(); ++other)
      if (other != r || to_it_too) links[index(other)].send_refusal(error, steady_clock::now() + 1s);
  };
  const auto name = [&] { return "init: rank " + std::to_string(r) + " of " + std::to_string(size()); };
  try {
    for (; r < size(); ++r) call(r);
  } catch (const Timeout&) {
    const Timeout late(name() + " connected, but did not answer within " + format_duration(timeout_));
    refuse_others(late, false);
    throw late;
  } catch (const Damaged&) {
    const BackendError damaged(damage(r, 0));
    refuse_others(damaged, true);
    throw damaged;
  } catch (const BackendError& error) {  // as that rank reported it
    refuse_others(error, false);
    throw;
  } catch (const Error& error) {
    const PeerLost lost(name() + " was lost: " + error.what());
    refuse_others(lost, false);
    throw lost;
  }
}

std::vector<std::string> ProcessBootstrap::all_gather(std::string_view blob) {
  if (switchboard_ != nullptr) throw InvalidUsage("bootstrap: exchanges must precede the first control channel");
  if (rank() != 0) return exchange_with_first(blob);
  std::vector<std::string> all(index(size()));
  all[0] = blob;
  each_peer(links_, [&](int r) { all[index(r)] = links_[index(r)].receive_frame(deadline_); });
  const std::string blobs = protocol::encode_blobs(all);
  each_peer(links_, [&](int r) { links_[index(r)].send_frame(blobs, deadline_); });
  return all;
}

/// Only rank 0 knows which ranks are missing, and its deadline may be slightly later than this rank's.
std::vector<std::string> ProcessBootstrap::exchange_with_first(std::string_view blob) {
  const Deadline until = deadline_ + kVerdictTime;
  try {
    links_[0].send_frame(blob, until);
    auto all = protocol::decode_blobs(
        links_[0].receive_frame(until, protocol::Type::data, protocol::max_blobs(index(size()))), index(size()));
    if (!all) throw SystemError("init: rank 0 sent an invalid message");
    return std::move(*all);
  } catch (const Damaged&) {
    const BackendError damaged(damage(0, rank()));
    links_[0].send_refusal(damaged, steady_clock::now() + 1s);
    throw damaged;
  } catch (const Timeout&) {
    if (steady_clock::now() < until) throw;  // rank 0's own message
    throw Timeout("init: rank 0 of " + std::to_string(size()) + " accepted this rank, but did not answer within " +
                  format_duration(timeout_));
  }
}

/// A rank that can't use a descriptor still takes part to the end, so that the others learn why.
void ProcessBootstrap::all_gather_fds(std::span<const int> fds, const UseDescriptors& use) {
  if (switchboard_ != nullptr) throw InvalidUsage("bootstrap: exchanges must precede the first control channel");
  if (fds.size() > kMaxDescriptors) throw InvalidUsage("bootstrap: a rank passes at most 8 descriptors");
  require_one_host(*this, "passing descriptors");
  std::exception_ptr failure;
  for (int first = 0; first < size(); first += kRanksAtOnce) {
    std::string counts(index(std::min(kRanksAtOnce, size() - first)), '\0');
    std::vector<UniqueFd> batch = gather_batch(fds, first, counts);
    std::span<UniqueFd> rest = batch;
    for (std::size_t i = 0; i < counts.size() && failure == nullptr; ++i) {
      const std::span<UniqueFd> theirs = rest.first(static_cast<std::uint8_t>(counts[i]));
      rest = rest.subspan(theirs.size());
      try {
        use(first + static_cast<int>(i), theirs);
      } catch (const Error&) {
        failure = std::current_exception();
      }
      for (UniqueFd& fd : theirs) fd.reset();
    }
  }
  exchange(*this, [&] {
    if (failure != nullptr) std::rethrow_exception(failure);
    return std::string();
  });
}

/// Returns the descriptors of the ranks from `first` on, for each of which `counts` has a place.
std::vector<UniqueFd> ProcessBootstrap::gather_batch(std::span<const int> own, int first, std::string& counts) {
  std::vector<Connection>& links = descriptor_links();
  const auto in_batch = [&](int r) { return r >= first && index(r - first) < counts.size(); };
  const std::string own_count(1, static_cast<char>(own.size()));
  if (rank() != 0) {
    if (in_batch(rank())) links[0].send_descriptors(own, own_count, deadline_);
    return links[0].receive_descriptors(counts, deadline_);
  }
  std::vector<UniqueFd> all;
  if (first == 0) counts[0] = own_count[0];
  for (std::size_t i = 0; first == 0 && i < own.size(); ++i)
    if (!all.emplace_back(::fcntl(own[i], F_DUPFD_CLOEXEC, 0))) throw system_error("init: dup");
  each_peer(links, [&](int r) {
    if (!in_batch(r)) return;
    std::string count(1, '\0');
    for (UniqueFd& fd : links[index(r)].receive_descriptors(count, deadline_)) all.push_back(std::move(fd));
    counts[index(r - first)] = count[0];
  });
  std::vector<int> numbers;
  for (const UniqueFd& fd : all) numbers.push_back(fd.get());
  each_peer(links, [&](int r) { links[index(r)].send_descriptors(numbers, counts, deadline_); });
  return all;
}

std::vector<Connection>& ProcessBootstrap::descriptor_links() {
  const Connection& any = links_.back();
  if (own_address(any.fd()).empty()) return links_;
  if (local_links_.empty()) local_links_ = connect_local_ranks();
  return local_links_;
}

/// Only Unix sockets carry descriptors: the ranks connect once more, at a name that only they know.
std::vector<Connection> ProcessBootstrap::connect_local_ranks() {
  RankIdentity self = self_;
  self.key = prove(token_, "descriptors");
  const std::string name = "tessera-" + to_hex(prove(token_, "name")).substr(0, 32);
  const std::string about = "on this host within " + format_duration(timeout_);
  if (rank() == 0) {
    std::vector<UniqueFd> listeners;
    listeners.push_back(listen_on(name));
    boost::asio::io_context context(1);
    RendezvousServer server(context, std::move(listeners), self, about);
    return server.accept_all(deadline_);
  }
  std::vector<Connection> links;
  const JoinPlan plan{.place = "its descriptor socket", .about = about, .deadline = deadline_};
  links.push_back(connect_to_rank0(self, plan, [&](std::string&, Digest&) { return connect_to(name); }).link);
  return links;
}

std::unique_ptr<ControlChannel> ProcessBootstrap::open_channel(std::string_view name, ControlEvents events) {
  if (switchboard_ == nullptr) {
    local_links_.clear();  // no descriptors pass any more
    if (!tree_.is_star()) links_ = std::move(tree_links_);
    ControlPlane::Members members{.rank = rank(), .tree = tree_, .links = std::move(links_), .pids = pids_};
    members.timeout = timeout_;
    switchboard_ = std::make_unique<ControlPlane>(*context_, std::move(members));
  }
  return switchboard_->open(name, std::move(events));
}

}  // namespace tessera::comm
