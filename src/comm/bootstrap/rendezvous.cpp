#include "tessera/comm/bootstrap/rendezvous.h"

#include <set>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/process_bootstrap.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"

namespace tessera::comm {
namespace {

using std::chrono::steady_clock;

/// TESSERA_TOKEN is any text; a key has 32 bytes.
Digest key_of(const Digest& base, const std::string& token) { return prove(base, "tessera token " + token); }

/// Without the key, one recorded hello suffices to try tokens at leisure. A random one of 128 bits can't be found so,
/// but one that a person has chosen can: then each attempt takes as long as this. Such a token is short or has few
/// different characters; a random one that looks so only costs a little time.
Digest key_of_token(const std::string& token) {
  constexpr std::size_t kLong = 32;  // hexadecimal digits of 128 bits
  constexpr std::size_t kMany = 8;
  const bool looks_random = token.size() >= kLong && std::set(token.begin(), token.end()).size() >= kMany;
  const Digest key = key_of({}, token);
  return looks_random ? key : stretch(key);
}

std::string about(const RendezvousOptions& options) {
  return "within " + format_duration(options.timeout) + " (launcher " + options.launch.launcher + ", run '" +
         options.launch.job + "')";
}

void check(const RendezvousOptions& options) {
  const Launch& launch = options.launch;
  if (options.store != nullptr || options.secret) return;
  if (options.token.empty() && options.tls != nullptr && !options.tls->has_certificates())
    throw InvalidUsage(
        "init: TESSERA_TLS=1 needs TESSERA_TOKEN, the same secret text for all ranks of the run (openssl rand -hex 16 "
        "makes one), or TESSERA_TLS_CERT, TESSERA_TLS_KEY and TESSERA_TLS_CA");
  if (!options.master.empty()) {
    if (!options.token.empty() || options.tls != nullptr) return;
    throw InvalidUsage("init: TESSERA_MASTER=" + options.master +
                       " needs TESSERA_TOKEN, the same secret text for all ranks of the run: random, 128 bits, such as "
                       "openssl rand -hex 16 makes");
  }
  if (launch.local_size < launch.size)
    throw InvalidUsage("init: the " + launch.launcher + " launcher says that " + std::to_string(launch.local_size) +
                       " of " + std::to_string(launch.size) +
                       " ranks are on this host: across hosts set TESSERA_MASTER=host:port (rank 0's host, a free "
                       "port) and TESSERA_TOKEN (a secret text: random, 128 bits, such as openssl rand -hex 16 makes), "
                       "the same for all ranks");
}

ProcessBootstrap::StarSockets parts_of(const RendezvousOptions& options, Deadline deadline) {
  ProcessBootstrap::StarSockets parts;
  parts.self = {.rank = options.launch.rank,
                .size = options.launch.size,
                .run = options.launch.job.substr(0, protocol::kMaxText),
                .restart = options.launch.restart,
                .generation = options.launch.generation,
                .tls = options.tls};
  parts.context = std::make_unique<boost::asio::io_context>(1);
  parts.tree = {options.launch.size,
                options.launch.size > options.largest_star ? std::max(options.tree_fan_out, 1) : options.launch.size};
  parts.host_id = options.host_id;
  parts.deadline = deadline;
  parts.timeout = options.timeout;
  return parts;
}

void open_server(ProcessBootstrap::StarSockets& parts, std::vector<UniqueFd> listeners, const std::string& text) {
  parts.server = std::make_unique<RendezvousServer>(*parts.context, std::move(listeners), parts.self, text);
  parts.session = parts.server->session();
  parts.links = parts.server->accept_all(parts.deadline);
}

void adopt(ProcessBootstrap::StarSockets& parts, JoinResult joined) {
  parts.session = joined.session;
  parts.self.key = joined.key;
  parts.links.push_back(std::move(joined.link));
}

JoinPlan plan_of(const RendezvousOptions& options, const ProcessBootstrap::StarSockets& parts, std::string place) {
  return {.place = std::move(place), .about = about(options), .deadline = parts.deadline, .logger = options.logger};
}

void rendezvous_at_master(const RendezvousOptions& options, ProcessBootstrap::StarSockets& parts) {
  const HostPort where = parse_host_port(options.master, "TESSERA_MASTER");
  if (options.launch.job_is_local) parts.self.run.clear();
  parts.self.key = key_of_token(options.token);
  if (parts.self.rank == 0) {
    const std::string text = "at TESSERA_MASTER=" + where.text() + " " + about(options);
    const std::string problem = loopback_problem("rank 0's host");
    return open_server(parts, listen_at(where), problem.empty() ? text : text + "; " + problem);
  }
  std::size_t attempt = 0;
  adopt(parts,
        connect_to_rank0(parts.self, plan_of(options, parts, "TESSERA_MASTER=" + where.text()),
                         [&](std::string& why, Digest&) { return connect_at(where, parts.deadline, why, attempt++); }));
}

RendezvousAddress address_from(const Digest& name, const Digest& token) {
  return {"tessera-" + to_hex(name).substr(0, 32), token};
}

void rendezvous_on_host(const RendezvousOptions& options, ProcessBootstrap::StarSockets& parts) {
  const std::string& job = options.launch.job;
  std::optional<RendezvousAddress> known;
  if (options.secret) known = address_from(prove(*options.secret, "name " + job), prove(*options.secret, "key " + job));
  if (parts.self.rank == 0) {
    remove_dead_rendezvous_files();
    const RendezvousAddress address = known ? *known : address_from(random_digest(), random_digest());
    std::vector<UniqueFd> listeners;
    listeners.push_back(listen_on(address.socket));
    std::optional<RendezvousFile> file;
    if (!known) file.emplace(job, address);
    parts.self.key = key_of(address.token, options.token);
    open_server(parts, std::move(listeners), about(options));
    parts.server.reset();  // late ranks can't find it any more
    return;
  }
  const auto connect = [&](std::string& why, Digest& key) {
    const std::optional<RendezvousAddress> address = known ? known : read_rendezvous_file(job);
    if (!address) {
      why = "there is no such file; all ranks must be on this host and have the same TESSERA_RUN_ID, or TESSERA_MASTER";
      return Connection();
    }
    key = key_of(address->token, options.token);
    why = "no answer at the address in it";
    return connect_to(address->socket);
  };
  adopt(parts, connect_to_rank0(parts.self,
                                plan_of(options, parts, known ? "its socket on this host" : usual_rendezvous_file(job)),
                                connect));
}

void rendezvous_in_store(const RendezvousOptions& options, ProcessBootstrap::StarSockets& parts) {
  const Launch& launch = options.launch;
  const std::string key = "tessera/rank0/" + std::to_string(launch.restart) + "." + std::to_string(launch.generation);
  const std::string host = options.host_id.empty() ? host_identity() : options.host_id;
  parts.self.run.clear();  // the store is the run's
  if (parts.self.rank == 0) {
    PublishedAddress address;
    std::vector<UniqueFd> listeners = listen_for_all(host, address);
    parts.self.key = key_of(address.token, {});
    options.store->set(key, address.text());
    open_server(parts, std::move(listeners), "by the program's store " + about(options));
    parts.server.reset();  // so that a rank of the next start that still reads this address is not answered
    return;
  }
  std::size_t attempt = 0;
  // Each attempt reads the address again: in a store that outlives a start, it may be that of the start before.
  const auto connect = [&](std::string& why, Digest& proven) {
    const std::optional<std::string> published = options.store->get(key, parts.deadline);
    if (!published) {
      why = "it has not published its address in the program's store";
      return Connection();
    }
    const PublishedAddress address = PublishedAddress::parse(*published);
    proven = key_of(address.token, {});
    if (address.host == host) {  // or so it seems
      if (Connection connection = connect_to(address.socket)) return connection;
      why = "no answer at its socket on this host";
      if (address.places.empty()) return Connection();
    }
    if (address.places.empty()) throw SystemError("init: rank 0's host has no network address");
    return connect_at_place(address, attempt++, parts.deadline, why);
  };
  adopt(parts, connect_to_rank0(parts.self, plan_of(options, parts, "its published address"), connect));
}

}  // namespace

std::shared_ptr<Bootstrap> rendezvous(const RendezvousOptions& options) {
  check(options);
  ProcessBootstrap::StarSockets parts = parts_of(options, base::deadline_after(options.timeout));
  if (options.store != nullptr)
    rendezvous_in_store(options, parts);
  else if (options.master.empty())
    rendezvous_on_host(options, parts);
  else
    rendezvous_at_master(options, parts);
  return std::make_shared<ProcessBootstrap>(std::move(parts));
}

}  // namespace tessera::comm
