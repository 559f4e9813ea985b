#include "tessera/comm/core/worlds.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/rendezvous.h"
#include "tessera/comm/core/composite.h"
#include "tessera/comm/plugins/builtin.h"

namespace tessera::comm {
namespace {

bool share_a_host(const Bootstrap& bootstrap) {
  const auto& hosts = bootstrap.hosts();
  return std::all_of(hosts.begin(), hosts.end(), [&](const std::string& host) { return host == hosts.front(); });
}

/// The ranks on this one's host.
std::vector<int> ranks_on_host(const Bootstrap& all) {
  const auto& hosts = all.hosts();
  std::vector<int> ranks;
  for (int r = 0; r < all.size(); ++r)
    if (hosts[static_cast<std::size_t>(r)] == hosts[static_cast<std::size_t>(all.rank())]) ranks.push_back(r);
  return ranks;
}

/// Connects the ranks of this rank's host in a bootstrap of their own. The world's token determines its name.
std::shared_ptr<Bootstrap> bootstrap_on_host(const Bootstrap& all, const BackendOptions& options) {
  const auto& hosts = all.hosts();
  const auto me = static_cast<std::size_t>(all.rank());
  Launch local;
  local.launcher = "host";
  local.rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + all.rank(), hosts[me]));
  local.size = static_cast<int>(options.global_ranks.size());
  local.local_rank = local.rank;
  local.local_size = local.size;
  local.job = "host." + hosts[me] + "." + to_hex(all.token());
  return rendezvous(
      {.launch = local, .timeout = options.communicator.timeout, .master = {}, .token = {}, .host_id = hosts[me]});
}

std::unique_ptr<Communicator> make_both(const Backend& near, const Backend& far, std::shared_ptr<Bootstrap> bootstrap,
                                        const BackendOptions& options) {
  if (!near.one_host || far.one_host)
    throw InvalidUsage("backend '" + std::string(near.name) + "+" + std::string(far.name) +
                       "': the first must be one for ranks of one host, the second one between hosts");
  if (share_a_host(*bootstrap)) return near.create(std::move(bootstrap), options);  // all ranks are near
  BackendOptions own = options;
  if (own.communicator.memory_tracker == nullptr) own.communicator.memory_tracker = std::make_shared<MemoryTracker>();
  BackendOptions local = own;
  local.global_ranks = ranks_on_host(*bootstrap);
  auto near_world = near.create(bootstrap_on_host(*bootstrap, local), local);
  return compose(std::move(near_world), far.create(std::move(bootstrap), own));
}

/// The first usable one in the library's order of preference. Throws InvalidUsage if there is none.
const Backend& best(bool one_host) {
  const Backend* found = nullptr;
  std::string reasons;
  for (const Backend* backend : builtin_backends()) {
    if (backend->one_host != one_host) continue;
    const std::string reason = backend->probe();
    if (!reason.empty()) reasons += (reasons.empty() ? "" : ", ") + std::string(backend->name) + " (" + reason + ")";
    if (reason.empty() && found == nullptr) found = backend;
  }
  if (found == nullptr) throw InvalidUsage("backend 'auto': no backend is available: " + reasons);
  return *found;
}

}  // namespace

std::unique_ptr<Communicator> make_world(const std::string& name, std::shared_ptr<Bootstrap> bootstrap,
                                         const Launch& launch, const BackendOptions& given,
                                         std::optional<bool> deterministic) {
  BackendOptions options = given;
  options.first_failure = std::make_shared<FirstFailureRecord>();
  options.deterministic = deterministic.value_or(true);
  if (const std::size_t plus = name.find('+'); plus != std::string::npos)
    return make_both(find_backend(name.substr(0, plus)), find_backend(name.substr(plus + 1)), std::move(bootstrap),
                     options);
  if (name != "auto") {
    const Backend& backend = find_backend(name);
    options.deterministic = deterministic.value_or(backend.deterministic);
    return backend.create(std::move(bootstrap), options);
  }
  const bool together = share_a_host(*bootstrap);
  const Backend& near = best(true);
  const std::string choice =
      together ? std::string(near.name) + ": all ranks share a host"
               : std::string(near.name) + "+" + std::string(best(false).name) + ": the ranks are on several hosts";
  if (launch.rank == 0 && options.communicator.logger != nullptr)
    options.communicator.logger->write(LogLevel::info, "backend auto: " + choice);
  if (together) return near.create(std::move(bootstrap), options);
  return make_both(near, best(false), std::move(bootstrap), options);
}

}  // namespace tessera::comm
