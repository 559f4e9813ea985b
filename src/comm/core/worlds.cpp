#include "tessera/comm/core/worlds.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/base/abi.h"
#include "tessera/base/error.h"
#include "tessera/comm/algorithms.h"
#include "tessera/comm/bootstrap/rendezvous.h"
#include "tessera/comm/bootstrap/secure_stream.h"
#include "tessera/comm/core/decorator.h"
#include "tessera/comm/core/env_variables.h"
#include "tessera/comm/plugins/module_loader.h"

namespace tessera::comm {
namespace {

/// Around the communicator that it uses.
class CompositeCommunicator final : public Decorator {
 public:
  CompositeCommunicator(std::unique_ptr<Communicator> near, std::unique_ptr<Communicator> far)
      : Decorator(std::move(near->size() == far->size() ? near : far)),
        uses_near_(near == nullptr),
        other_(std::move(uses_near_ ? far : near)) {
    own_capabilities().splits_share_memory = near_.capabilities().splits_share_memory;
    own_capabilities().memory = near_.capabilities().memory;
    own_capabilities().deterministic = near_.capabilities().deterministic && far_.capabilities().deterministic;
    const std::int32_t own = rank();
    near_ranks_.resize(static_cast<std::size_t>(near_.size()));
    near_.all_gather(view_of(&own, 1), view_of(near_ranks_.data(), near_ranks_.size())).wait();
    forget_traffic();
  }
  ~CompositeCommunicator() override {
    if (uses_near_) close_inner();  // near_ closes first
  }

 private:
  /// All members of a child that share a host belong to the same near communicator, which is split in the same way.
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override {
    auto far = far_.split(color, key, options);
    auto near = near_.split(color, key, options);
    if (far == nullptr) return nullptr;
    return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
  }
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override {
    std::vector<int> near_members;  // those on this host
    for (const int member : members)
      for (std::size_t k = 0; k < near_ranks_.size(); ++k)
        if (near_ranks_[k] == member) near_members.push_back(static_cast<int>(k));
    // First on the one that this communicator uses, which a failure is to end.
    std::unique_ptr<Communicator> far;
    if (!uses_near_) far = far_.create_group(members, options);
    auto near = near_.create_group(near_members, options);
    if (far == nullptr) far = far_.create_group(members, options);
    return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
  }
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    return near_.allocate(bytes, kind, use);
  }
  /// Of no use to far_, whose ranks do not all share near_.
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    return uses_near_ ? Decorator::do_allocate_symmetric(bytes, kind, use) : do_allocate(bytes, kind, use);
  }
  void do_abort(std::string_view reason) noexcept override {
    far_.abort(std::string(reason));
    near_.abort(std::string(reason));
  }

  const bool uses_near_;
  const std::unique_ptr<Communicator> other_;
  Communicator& near_ = uses_near_ ? inner() : *other_;
  Communicator& far_ = uses_near_ ? *other_ : inner();
  std::vector<std::int32_t> near_ranks_;  ///< rank in `far_` of each member of `near_`
};

bool share_a_host(const Bootstrap& bootstrap) {
  const auto& hosts = bootstrap.hosts();
  return std::ranges::all_of(hosts, [&](const std::string& host) { return host == hosts.front(); });
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
  local.job = "host." + hosts[me];
  return rendezvous({.launch = local,
                     .timeout = options.communicator.timeout,
                     .master = {},
                     .token = {},
                     .host_id = hosts[me],
                     .tls = options.tls,
                     .secret = all.token()});
}

/// `near` for communicators whose members share a host, `far` for all others.
std::unique_ptr<Communicator> make_both(const Backend& near, const Backend& far, std::shared_ptr<Bootstrap> bootstrap,
                                        const BackendOptions& options) {
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

/// The one backend of a world, or the one of near communicators and the one of far ones.
std::vector<const Backend*> find_backends(const std::string& name, bool one_host) {
  std::vector<const Backend*> found;
  if (name == "auto") {
    found = {&best(true)};
    if (!one_host) found.push_back(&best(false));
    return found;
  }
  const std::size_t plus = name.find('+');
  found = {&find_backend(name.substr(0, plus))};
  if (plus == std::string::npos) return found;
  found.push_back(&find_backend(name.substr(plus + 1)));
  if (!found.front()->one_host || found.back()->one_host)
    throw InvalidUsage("backend '" + name +
                       "': the first must be one for ranks of one host, the second one between hosts");
  if (one_host) found.pop_back();
  return found;
}

[[noreturn]] void throw_unencrypted(const Backend& backend) {
  std::string others;
  for (const Backend* other : builtin_backends())
    if (other->encrypts) others += (others.empty() ? "" : " or ") + std::string(other->name);
  throw InvalidUsage("backend '" + std::string(backend.name) + "' does not encrypt its data, but TESSERA_TLS=1: use " +
                     others + ", or set TESSERA_TLS=0 and encrypt the network below it (WireGuard, IPsec)");
}

}  // namespace

std::unique_ptr<Communicator> make_world(const std::string& name, std::shared_ptr<Bootstrap> bootstrap,
                                         BackendOptions& options, std::optional<bool> deterministic) {
  options.first_failure = std::make_shared<FirstFailureRecord>();
  const bool one_host = share_a_host(*bootstrap);
  std::vector<const Backend*> backends;
  std::string names;
  const auto flag = [](bool value) { return std::string(value ? "1" : "0"); };
  const auto own_settings = [&] {
    backends = find_backends(name, one_host);
    for (const Backend* backend : backends)
      if (options.tls != nullptr && !backend->encrypts && !backend->one_host) throw_unencrypted(*backend);
    for (const Backend* backend : backends) names += (names.empty() ? "" : "+") + std::string(backend->name);
    options.deterministic = deterministic.value_or(backends.size() > 1 || backends.front()->deterministic);
    options.algorithms = AlgorithmTable::one_line(options.algorithms);
    return std::vector<SharedSetting>{{"the library's ABI number", TESSERA_ABI_TEXT(TESSERA_ABI_NUMBER)},
                                      {std::string(env::kBackend.name), names},
                                      {std::string(env::kDeterministic.name), flag(options.deterministic)},
                                      {std::string(env::kCheck.name), flag(options.check)},
                                      {std::string(env::kTls.name), std::to_string(tls_kind(options.tls.get()))},
                                      {std::string(env::kAlgo.name), options.algorithms}};
  };
  require_alike(*bootstrap, own_settings, options.global_ranks);
  if (name == "auto" && bootstrap->rank() == 0 && options.communicator.logger != nullptr)
    options.communicator.logger->write(
        LogLevel::info,
        "backend auto: " + names + (one_host ? ": all ranks share a host" : ": the ranks are on several hosts"));
  if (backends.size() > 1) return make_both(*backends.front(), *backends.back(), std::move(bootstrap), options);
  return backends.front()->create(std::move(bootstrap), options);
}

std::unique_ptr<Communicator> compose(std::unique_ptr<Communicator> near, std::unique_ptr<Communicator> far) {
  return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
}

}  // namespace tessera::comm
