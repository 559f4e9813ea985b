#include "tessera/comm/bootstrap/rendezvous.h"

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

std::string about(const RendezvousOptions& meeting) {
  return "within " + format_duration(meeting.timeout) + " (launcher " + meeting.launch.launcher + ", run '" +
         meeting.launch.job + "')";
}

void check(const RendezvousOptions& meeting) {
  const Launch& launch = meeting.launch;
  if (!meeting.master.empty()) {
    if (!meeting.token.empty()) return;
    throw InvalidUsage("init: TESSERA_MASTER=" + meeting.master +
                       " needs TESSERA_TOKEN, the same secret text for all ranks of the run (openssl rand -hex 16 "
                       "makes one)");
  }
  if (launch.local_size < launch.size)
    throw InvalidUsage("init: the " + launch.launcher + " launcher says that " + std::to_string(launch.local_size) +
                       " of " + std::to_string(launch.size) +
                       " ranks are on this host: across hosts set TESSERA_MASTER=host:port (rank 0's host, a free "
                       "port) and TESSERA_TOKEN (a secret text), the same for all ranks");
}

ProcessBootstrap::StarSockets parts_of(const RendezvousOptions& meeting, Deadline deadline) {
  ProcessBootstrap::StarSockets parts;
  parts.self = {.rank = meeting.launch.rank,
                .size = meeting.launch.size,
                .run = meeting.launch.job.substr(0, protocol::kLongestText),
                .restart = meeting.launch.restart,
                .generation = meeting.launch.generation};
  parts.context = std::make_unique<boost::asio::io_context>(1);
  parts.host_id = meeting.host_id;
  parts.deadline = deadline;
  parts.timeout = meeting.timeout;
  return parts;
}

void open_door(ProcessBootstrap::StarSockets& parts, std::vector<UniqueFd> listeners, const std::string& text) {
  parts.door = std::make_unique<RendezvousServer>(*parts.context, std::move(listeners), parts.self, text);
  parts.session = parts.door->session();
  parts.links = parts.door->accept_all(parts.deadline);
}

void take(ProcessBootstrap::StarSockets& parts, JoinResult joined) {
  parts.session = joined.session;
  parts.self.key = joined.key;
  parts.links.push_back(std::move(joined.link));
}

void meet_at_master(const RendezvousOptions& meeting, ProcessBootstrap::StarSockets& parts) {
  const HostPort where = parse_host_port(meeting.master, "TESSERA_MASTER");
  if (meeting.launch.job_is_local) parts.self.run.clear();
  parts.self.key = key_of({}, meeting.token);
  if (parts.self.rank == 0)
    return open_door(parts, listen_at(where), "at TESSERA_MASTER=" + where.text() + " " + about(meeting));
  take(parts, connect_to_rank0(parts.self, "TESSERA_MASTER=" + where.text(), parts.deadline, about(meeting),
                               [&](std::string& why, Digest&) { return connect_at(where, parts.deadline, why); }));
}

void meet_on_one_host(const RendezvousOptions& meeting, ProcessBootstrap::StarSockets& parts) {
  const std::string& job = meeting.launch.job;
  if (parts.self.rank == 0) {
    remove_dead_job_files();
    const RendezvousAddress address{"tessera-" + to_hex(random_digest()).substr(0, 32), random_digest()};
    std::vector<UniqueFd> listeners;
    listeners.push_back(listen_on(address.socket));
    const RendezvousFile file(job, address);
    parts.self.key = key_of(address.token, meeting.token);
    open_door(parts, std::move(listeners), about(meeting));
    parts.door.reset();  // late ranks can't find it any more
    return;
  }
  const std::string path = job_file_path(job);
  const auto connect = [&](std::string& why, Digest& key) {
    const std::optional<RendezvousAddress> address = read_job_file(path);
    if (!address) {
      why = "there is no such file; all ranks must be on this host and have the same TESSERA_RUN_ID, or TESSERA_MASTER";
      return Connection();
    }
    key = key_of(address->token, meeting.token);
    why = "no answer at the address in it";
    return connect_to(address->socket);
  };
  take(parts, connect_to_rank0(parts.self, path, parts.deadline, about(meeting), connect));
}

}  // namespace

std::shared_ptr<Bootstrap> rendezvous(const RendezvousOptions& meeting) {
  check(meeting);
  ProcessBootstrap::StarSockets parts = parts_of(meeting, steady_clock::now() + meeting.timeout);
  if (meeting.master.empty())
    meet_on_one_host(meeting, parts);
  else
    meet_at_master(meeting, parts);
  return std::make_shared<ProcessBootstrap>(std::move(parts));
}

}  // namespace tessera::comm
