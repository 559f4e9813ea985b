#include "tessera/fsdp/collective.h"

namespace tessera::fsdp {

using comm::OpKind;

CollectivePlugin::~CollectivePlugin() = default;

void Works::wait_on(Stream& stream) {
  for (comm::Work& work : works_) work.wait_on(stream);
  works_.clear();
}

namespace {

class Plain final : public CollectivePlugin {
 public:
  explicit Plain(OpKind kind) : kind_(kind) {}
  Works run(const CollectiveCall& call) override {
    Works works;
    for (const Transfer& transfer : call.transfers) works.add(start(call, transfer));
    return works;
  }

 private:
  comm::Work start(const CollectiveCall& call, const Transfer& transfer) const {
    switch (kind_) {
      case OpKind::all_gather:
        return call.channel.all_gather(transfer.in, transfer.out, call.options);
      case OpKind::reduce_scatter:
        return call.channel.reduce_scatter(transfer.in, transfer.out, call.op, call.options);
      default:
        return call.channel.all_reduce(transfer.in, transfer.out, call.op, call.options);
    }
  }
  const OpKind kind_;
};

}  // namespace

CollectiveRegistry CollectiveRegistry::built_in() {
  CollectiveRegistry registry;
  for (const OpKind kind : {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce})
    registry.add(kind, "plain", [kind] { return std::make_unique<Plain>(kind); });
  return registry;
}

void CollectiveRegistry::add(OpKind collective, std::string name, Make make) {
  makers_[{collective, std::move(name)}] = std::move(make);
}

std::unique_ptr<CollectivePlugin> CollectiveRegistry::make(OpKind collective, std::string_view name) const {
  const auto found = makers_.find({collective, std::string(name)});
  if (found != makers_.end()) return found->second();
  std::string known;
  for (const auto& [key, unused] : makers_)
    if (key.first == collective) known += (known.empty() ? "" : " ") + key.second;
  throw InvalidUsage("no plug-in '" + std::string(name) + "' for " + std::string(comm::name_of(collective)) +
                     "; known: " + known);
}

std::vector<std::string> CollectiveRegistry::names() const {
  std::vector<std::string> names;
  for (const auto& [key, unused] : makers_) names.push_back(std::string(comm::name_of(key.first)) + ":" + key.second);
  return names;
}

}  // namespace tessera::fsdp
