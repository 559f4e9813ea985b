#include "tessera/fsdp/collective_plugin.h"

#include <algorithm>

#include "tessera/fsdp/plugin.h"

namespace tessera::fsdp {

using comm::OpKind;

CollectivePlugin::~CollectivePlugin() = default;

bool CollectiveCapabilities::gathers_quantized() const {
  return exact && (dtypes.empty() || std::find(dtypes.begin(), dtypes.end(), DType::u8) != dtypes.end());
}

bool WorkChain::advance(Stream& stream) {
  for (comm::Work& work : works_) work.wait_on(stream);
  works_.clear();
  const Next next = std::exchange(next_, nullptr);
  if (!next) return false;
  *this = next(stream);
  return !empty();
}

void WorkChain::wait_on(Stream& stream) {
  while (advance(stream)) {
  }
}

comm::Work start_plain(OpKind collective, const CollectiveCall& call, const FlatTransfer& transfer) {
  switch (collective) {
    case OpKind::all_gather:
      return call.channel.all_gather(transfer.in, transfer.out, call.options);
    case OpKind::reduce_scatter:
      return call.channel.reduce_scatter(transfer.in, transfer.out, call.op, call.options);
    default:
      return call.channel.all_reduce(transfer.in, transfer.out, call.op, call.options);
  }
}

std::uint64_t plain_bytes(OpKind collective, const FlatTransfer& transfer, int ranks) {
  const std::size_t elements = std::max(transfer.in.count, transfer.out.count);
  return comm::direct_bytes_sent(collective, elements, size_of(transfer.in.dtype), ranks, 0);
}

namespace {

class Plain final : public CollectivePlugin {
 public:
  explicit Plain(OpKind kind) : kind_(kind) {}
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& transfer : call.transfers) {
      works.add(start_plain(kind_, call, transfer));
      stats_.raw += plain_bytes(kind_, transfer, call.channel.size());
    }
    stats_.sent = stats_.raw;
    return works;
  }

 private:
  const OpKind kind_;
};

/// Flat parameters are padded to a multiple of the number of ranks, so every rank sends the same number of bytes.
CollectiveCost plain_cost(OpKind kind, const CollectiveSize& size) {
  return {1, comm::direct_bytes_sent(kind, size.elements, size_of(size.dtype), size.ranks, 0)};
}

}  // namespace

CollectiveRegistry CollectiveRegistry::built_in() {
  CollectiveRegistry registry;
  for (const OpKind kind : {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce})
    registry.add(kind, "plain", [kind] { return std::make_unique<Plain>(kind); });
  add_built_in_collectives(registry);
  return registry;
}

CollectiveRegistry::Entry CollectiveRegistry::entry_of(OpKind collective, Factory make, Cost cost) {
  if (!cost) cost = [collective](const CollectiveSize& size) { return plain_cost(collective, size); };
  return {std::move(make), std::move(cost)};
}

void CollectiveRegistry::add(OpKind collective, std::string name, Factory make, Cost cost) {
  entries_[{collective, std::move(name)}] = entry_of(collective, std::move(make), std::move(cost));
}

CollectiveRegistry::Entry CollectiveRegistry::find(OpKind collective, std::string_view name) const {
  if (is_plugin_name(name)) {
    ExportedCollective exported = plugin_collective(collective, name);
    return entry_of(collective, std::move(exported.make), std::move(exported.cost));
  }
  const auto found = entries_.find({collective, std::string(name)});
  if (found != entries_.end()) return found->second;
  std::string known;
  for (const auto& [key, unused] : entries_)
    if (key.first == collective) known += (known.empty() ? "" : " ") + key.second;
  throw InvalidUsage("no plug-in '" + std::string(name) + "' for " + std::string(comm::name_of(collective)) +
                     "; known: " + known);
}

std::unique_ptr<CollectivePlugin> CollectiveRegistry::make(OpKind collective, std::string_view name) const {
  return find(collective, name).make();
}

CollectiveCost CollectiveRegistry::cost(OpKind collective, std::string_view name, const CollectiveSize& size) const {
  return find(collective, name).cost(size);
}

bool CollectiveRegistry::has(OpKind collective, std::string_view name) const {
  return is_plugin_name(name) ? has_plugin_collective(collective, name)
                              : entries_.contains({collective, std::string(name)});
}

std::vector<std::string> CollectiveRegistry::names() const {
  std::vector<std::string> names;
  for (const auto& [key, unused] : entries_) names.push_back(std::string(comm::name_of(key.first)) + ":" + key.second);
  return names;
}

}  // namespace tessera::fsdp
