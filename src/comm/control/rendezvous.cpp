#include "tessera/comm/control/rendezvous.h"

#include <unistd.h>

#include <cstring>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/control/job_file.h"
#include "tessera/comm/control/proof.h"
#include "tessera/comm/control/socket.h"
#include "tessera/comm/control/watch.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr auto kHandshakeTime = 5s;  // of one rank, once it is connected

struct Hello {
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  Digest nonce;
  Digest proof;
};

/// What both sides of a handshake prove to know the token for.
std::string statement(std::string_view side, const Digest& challenge, const Hello& hello, const std::string& job) {
  return std::string(side) + to_hex(challenge) + to_hex(hello.nonce) + std::to_string(hello.rank) + "/" +
         std::to_string(hello.size) + "/" + job;
}

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

template <class T>
T receive(Connection& connection, Deadline deadline) {
  const std::string frame = connection.receive_frame(deadline);
  T value;
  if (frame.size() != sizeof(value)) throw SystemError("init: another rank speaks another version");
  std::memcpy(&value, frame.data(), sizeof(value));
  return value;
}

/// Tells of the death of ranks only.
class WatchedChannel final : public ControlChannel {
 public:
  WatchedChannel(const std::vector<Lifeline>& lifelines, std::function<void(int)> lost)
      : watch_(lifelines, std::move(lost)) {}
  void tell(int, std::string_view) noexcept override {}

 private:
  Watch watch_;
};

/// A star around rank 0.
class ProcessBootstrap final : public Bootstrap {
 public:
  ProcessBootstrap(Launch launch, Deadline deadline, std::vector<Connection> links, const Token& token)
      : launch_(std::move(launch)),
        deadline_(deadline),
        links_(std::move(links)),
        hosts_(static_cast<std::size_t>(launch_.size), "here"),
        token_(token) {}

  int rank() const noexcept override { return launch_.rank; }
  int size() const noexcept override { return launch_.size; }
  bool in_process() const noexcept override { return false; }

  std::vector<std::string> exchange(std::string_view blob) override {
    std::vector<std::string> all(static_cast<std::size_t>(size()));
    if (rank() != 0) {
      hub().send_frame(blob, deadline_);
      for (std::string& one : all) one = hub().receive_frame(deadline_);
      return all;
    }
    all[0] = blob;
    each_peer([&](int r) { all[index(r)] = link(r).receive_frame(deadline_); });
    each_peer([&](int r) {
      for (const std::string& one : all) link(r).send_frame(one, deadline_);
    });
    return all;
  }

  std::vector<UniqueFd> exchange_descriptors(int fd) override {
    std::vector<UniqueFd> all(static_cast<std::size_t>(size()));
    if (rank() != 0) {
      hub().send_descriptor(fd, deadline_);
      for (UniqueFd& one : all) one = hub().receive_descriptor(deadline_);
      return all;
    }
    all[0] = UniqueFd(::dup(fd));
    each_peer([&](int r) { all[index(r)] = link(r).receive_descriptor(deadline_); });
    each_peer([&](int r) {
      for (const UniqueFd& one : all) link(r).send_descriptor(one.get(), deadline_);
    });
    return all;
  }

  std::unique_ptr<ControlChannel> open_channel(std::string_view, ControlEvents events) override {
    const std::vector<std::string> pids = exchange(std::to_string(::getpid()));
    // A pid means the same to all only where all see the same processes; the kernel tells rank 0 how it sees the
    // others.
    bool visible = true;
    if (rank() == 0) each_peer([&](int r) { visible &= link(r).peer_pid() == std::stoi(pids[index(r)]); });
    visible = exchange(visible ? "yes" : "no").front() == "yes";
    std::vector<Lifeline> lifelines;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      const int connection = rank() == 0 ? link(r).fd() : (r == 0 ? hub().fd() : -1);
      lifelines.push_back({r, connection, visible ? std::stoi(pids[index(r)]) : 0});
    }
    return std::make_unique<WatchedChannel>(lifelines, std::move(events.lost));
  }
  const std::vector<std::string>& hosts() const noexcept override { return hosts_; }
  const Token& token() const noexcept override { return token_; }
  std::string local_address() const override { return "127.0.0.1"; }

 private:
  static std::size_t index(int r) { return static_cast<std::size_t>(r); }
  Connection& link(int r) { return links_[index(r)]; }
  Connection& hub() { return links_[0]; }

  template <class F>
  void each_peer(F&& call) {
    int r = 1;
    try {
      for (; r < size(); ++r) call(r);
    } catch (const Error& error) {
      const std::string text =
          "init: rank " + std::to_string(r) + " of " + std::to_string(size()) + " was lost: " + error.what();
      for (int other = 1; other < size(); ++other)
        if (other != r) link(other).send_refusal(text, steady_clock::now() + 1s);
      throw PeerLost(text);
    }
  }

  const Launch launch_;
  const Deadline deadline_;
  std::vector<Connection> links_;  // rank 0: one for each rank, its own empty; else only [0]
  const std::vector<std::string> hosts_;
  const Token token_;
};

/// The rank that came, or -1 where it is not one of ours.
int welcome(Connection& connection, const Launch& launch, const Digest& token, const std::vector<Connection>& here) {
  const Deadline deadline = steady_clock::now() + kHandshakeTime;
  if (!connection.peer_is_this_user()) return -1;
  const Digest challenge = random_digest();
  connection.send_frame(bytes_of(challenge), deadline);
  const auto hello = receive<Hello>(connection, deadline);
  if (!same(hello.proof, prove(token, statement("client", challenge, hello, launch.job)))) return -1;
  std::string refusal;
  if (hello.size != static_cast<std::uint32_t>(launch.size)) {
    refusal = "init: rank " + std::to_string(hello.rank) + " was started as one of " + std::to_string(hello.size) +
              " ranks, rank 0 as one of " + std::to_string(launch.size);
  } else if (hello.rank == 0 || hello.rank >= hello.size || here[hello.rank]) {
    refusal = "init: there are two ranks " + std::to_string(hello.rank) + " in run '" + launch.job + "'";
  }
  if (!refusal.empty()) {
    connection.send_refusal(refusal, deadline);
    throw InvalidUsage(refusal);
  }
  connection.send_frame(bytes_of(prove(token, statement("server", challenge, hello, launch.job))), deadline);
  return static_cast<int>(hello.rank);
}

std::string missing(const std::vector<Connection>& links) {
  std::string text;
  for (std::size_t r = 1; r < links.size(); ++r)
    if (!links[r]) text += (text.empty() ? "" : ", ") + std::to_string(r);
  return text;
}

std::vector<Connection> host(const Launch& launch, Deadline deadline, std::chrono::milliseconds timeout) {
  const JobAddress address{"tessera-" + to_hex(random_digest()).substr(0, 32), random_digest()};
  const UniqueFd listener = listen_on(address.socket);
  const JobFile file(launch.job, address);
  std::vector<Connection> links(static_cast<std::size_t>(launch.size));
  const auto refuse_all = [&](const std::string& text) {
    for (Connection& link : links)
      if (link) link.send_refusal(text, steady_clock::now() + 1s);
  };
  for (int joined = 1; joined < launch.size;) {
    Connection connection = accept_from(listener.get(), deadline);
    if (!connection) {
      const std::string text = "init: of " + std::to_string(launch.size) + " ranks, rank " + missing(links) +
                               " did not come within " + format_duration(timeout) + " (launcher " + launch.launcher +
                               ", run '" + launch.job + "')";
      refuse_all(text);
      throw Timeout(text);
    }
    int rank = -1;
    try {
      rank = welcome(connection, launch, address.token, links);
    } catch (const InvalidUsage& error) {
      refuse_all(error.what());
      throw;
    } catch (const Error&) {  // a stranger, or a rank that died while it came: then the others will miss it
      continue;
    }
    if (rank < 0) continue;
    links[static_cast<std::size_t>(rank)] = std::move(connection);
    ++joined;
  }
  return links;
}

std::vector<Connection> join(const Launch& launch, Deadline deadline, std::chrono::milliseconds timeout) {
  const std::string path = job_file_path(launch.job);
  for (auto pause = 1ms; steady_clock::now() < deadline; pause = std::min(pause * 2, 50ms)) {
    Connection connection;
    const std::optional<JobAddress> address = read_job_file(path);
    if (address) connection = connect_to(address->socket);
    if (!connection) {
      std::this_thread::sleep_for(pause);
      continue;
    }
    Hello hello;
    hello.rank = static_cast<std::uint32_t>(launch.rank);
    hello.size = static_cast<std::uint32_t>(launch.size);
    hello.nonce = random_digest();
    const auto challenge = receive<Digest>(connection, deadline);
    hello.proof = prove(address->token, statement("client", challenge, hello, launch.job));
    connection.send_frame(bytes_of(hello), deadline);
    const auto answer = receive<Digest>(connection, deadline);
    if (!connection.peer_is_this_user() ||
        !same(answer, prove(address->token, statement("server", challenge, hello, launch.job))))
      throw SystemError("init: who answers at the address in " + path + " does not know its token");
    std::vector<Connection> links;
    links.push_back(std::move(connection));
    return links;
  }
  throw Timeout("init: rank " + std::to_string(launch.rank) + " of " + std::to_string(launch.size) +
                " found no rank 0 within " + format_duration(timeout) + " (launcher " + launch.launcher + ", run '" +
                launch.job + "'); all ranks must be on this host and have the same TESSERA_RUN_ID");
}

}  // namespace

std::shared_ptr<Bootstrap> meet(const Launch& launch, std::chrono::milliseconds timeout) {
  const Deadline deadline = steady_clock::now() + timeout;
  std::vector<Connection> links = launch.rank == 0 ? host(launch, deadline, timeout) : join(launch, deadline, timeout);
  return std::make_shared<ProcessBootstrap>(launch, deadline, std::move(links), Bootstrap::Token{});
}

}  // namespace tessera::comm
