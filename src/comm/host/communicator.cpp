// The Communicator over a transport: the public interface of a HostGroup.
#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/host/host_group.h"
#include "tessera/comm/host_communicator.h"

namespace tessera::comm {
namespace host {
namespace {

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(std::shared_ptr<HostGroup> group, CommunicatorOptions options, bool is_world)
      : Communicator(group->rank(), group->size(), std::move(options)), group_(std::move(group)), is_world_(is_world) {
    group_->open();
  }
  ~HostCommunicator() override {
    group_->close();
    if (is_world_) group_->world().leave();
  }
  const Capabilities& capabilities() const noexcept override { return group_->world().capabilities(); }

 private:
  Work do_start(const OpDesc& call) override { return group_->start(call, false); }
  Work do_batch(std::span<const OpDesc> parts) override { return group_->start_batch(parts); }
  void do_abort(std::string_view reason) noexcept override { group_->abort(reason); }
  void do_traffic(TrafficStats& snapshot) const override { group_->read_traffic(snapshot); }
  std::string_view do_last_algorithm() const noexcept override { return group_->last_algorithm(); }
  std::unique_ptr<Communicator> do_split(int color, int key) override;
  std::unique_ptr<NativeCommunicator> copy_native();
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;

  /// Gathers every member's value, without counting traffic. `mine` has the same length on all members.
  template <class T>
  std::vector<T> collect(const T& mine) {
    std::vector<T> all(static_cast<std::size_t>(size()));
    const OpDesc call{.kind = OpKind::all_gather,
                      .in = {&mine, sizeof(T), DType::u8, {}},
                      .out = {all.data(), sizeof(T) * all.size(), DType::u8, {}},
                      .timeout = timeout(),
                      .label = "split"};
    group_->start(call, true).wait();
    return all;
  }

  const std::shared_ptr<HostGroup> group_;
  const bool is_world_;
};

Buffer HostCommunicator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  if (kind != MemoryKind::host) throw Unsupported(std::string(backend()) + ": allocate gives memory of the host only");
  // Without a use the caller tracks the memory, so it comes from a pool with an unused tracker.
  return (use ? group_->world().memory() : group_->world().unbooked_memory())
      .allocate(bytes, use.value_or(MemoryCategory::other));
}

/// Null if the library has no more of them on some rank.
std::unique_ptr<NativeCommunicator> HostCommunicator::copy_native() {
  std::unique_ptr<NativeCommunicator> copy;
  group_->start_copy(copy).wait();
  const std::vector<char> all = collect(static_cast<char>(copy != nullptr));
  if (std::find(all.begin(), all.end(), 0) == all.end()) return copy;
  const std::lock_guard lock(group_->world().engine().mutex());
  copy.reset();
  return nullptr;
}

/// In each round every rank proposes a number; each color uses the highest proposal of its members. If that is in use
/// on one of them, all try again.
std::unique_ptr<Communicator> HostCommunicator::do_split(int color, int key) {
  struct Choice {
    int color;
    int key;
    int rank;
    std::uint32_t proposal;
  };
  HostRuntime& world = group_->world();
  std::uint32_t from = group_->number() + 1;
  while (true) {
    std::vector<Choice> choices = collect(Choice{color, key, rank(), color < 0 ? 0 : world.free_number(from)});
    std::erase_if(choices, [&](const Choice& choice) { return choice.color != color || color < 0; });
    std::uint32_t number = 0;
    for (const Choice& choice : choices) number = std::max(number, choice.proposal);
    const bool got = color < 0 || world.reserve(number);
    const std::vector<char> all_got = collect(static_cast<char>(got));
    if (std::find(all_got.begin(), all_got.end(), 0) != all_got.end()) {
      if (got && color >= 0) world.give_back(number);
      from = number + 1;
      continue;
    }
    if (color < 0) return nullptr;
    std::stable_sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) { return a.key < b.key; });
    std::vector<int> members;
    int place = 0;
    for (const Choice& choice : choices) {
      if (choice.rank == rank()) place = static_cast<int>(members.size());
      members.push_back(group_->world_rank(choice.rank));
    }
    const bool same_ranks =
        static_cast<int>(members.size()) == world.size() && std::is_sorted(members.begin(), members.end());
    auto part = std::make_shared<HostGroup>(group_->shared_world(), number, place, std::move(members), options());
    if (same_ranks && group_->native() != nullptr) part->use_native(copy_native());
    return std::make_unique<HostCommunicator>(std::move(part), options(), false);
  }
}

}  // namespace
}  // namespace host

std::unique_ptr<Communicator> make_host_communicator(std::shared_ptr<Bootstrap> bootstrap,
                                                     const BackendOptions& options, const std::string& name,
                                                     const TransportFactory& make_transport,
                                                     std::span<const OpKind> native) {
  BackendOptions own = options;
  if (own.communicator.memory_tracker == nullptr) own.communicator.memory_tracker = std::make_shared<MemoryTracker>();
  const auto world = std::make_shared<host::HostRuntime>(std::move(bootstrap), own, name, native);
  world->connect(make_transport);
  world->reserve(0);
  std::vector<int> members(static_cast<std::size_t>(world->size()));
  for (std::size_t i = 0; i < members.size(); ++i) members[i] = static_cast<int>(i);
  auto group = std::make_shared<host::HostGroup>(world, 0, world->rank(), std::move(members), own.communicator);
  if (NativeCollectives* const offered = world->transport().native(); offered != nullptr && !own.deterministic)
    if (auto whole = offered->whole_world()) group->use_native(std::move(whole));
  return std::make_unique<host::HostCommunicator>(std::move(group), own.communicator, true);
}

}  // namespace tessera::comm
