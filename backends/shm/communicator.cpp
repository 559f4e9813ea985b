#include "backends/shm/communicator.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::comm::shm {

ShmCommunicator::ShmCommunicator(std::shared_ptr<ShmGroup> group, CommunicatorOptions options, bool is_world)
    : Communicator(group->rank(), group->size(), std::move(options)), group_(std::move(group)), is_world_(is_world) {}

ShmCommunicator::~ShmCommunicator() {
  group_->close();
  if (is_world_) group_->host().leave();
}

const Capabilities& ShmCommunicator::capabilities() const noexcept { return group_->host().capabilities(); }
Work ShmCommunicator::do_start(const OpDesc& call) { return group_->start(call, false); }
Work ShmCommunicator::do_batch(std::span<const OpDesc> parts) { return group_->start_batch(parts); }
void ShmCommunicator::do_abort(std::string_view reason) noexcept { group_->abort(reason); }
void ShmCommunicator::do_traffic(TrafficStats& snapshot) const { group_->read_traffic(snapshot); }

Buffer ShmCommunicator::do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) {
  if (kind != MemoryKind::host) throw Unsupported("shm: allocate gives memory of the host only");
  return group_->host().arena().allocate(bytes, use.value_or(MemoryCategory::other), use ? memory_tracker() : nullptr);
}

template <class T>
std::vector<T> ShmCommunicator::collect(const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(size()));
  const OpDesc call{.kind = OpKind::all_gather,
                    .in = {&mine, sizeof(T), DType::u8, {}},
                    .out = {all.data(), sizeof(T) * all.size(), DType::u8, {}},
                    .timeout = timeout(),
                    .label = "split"};
  group_->start(call, true).wait();
  return all;
}

std::unique_ptr<Communicator> ShmCommunicator::do_split(int color, int key) {
  struct Choice {
    int color;
    int key;
    int rank;
  };
  std::vector<Choice> choices = collect(Choice{color, key, rank()});
  std::erase_if(choices, [&](const Choice& choice) { return choice.color != color || color < 0; });
  std::stable_sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) { return a.key < b.key; });
  std::shared_ptr<ShmGroup> child;
  ShmGroup::MemberOffsets place;
  for (std::size_t i = 0; i < choices.size(); ++i)
    if (choices[i].rank == rank())
      child = ShmGroup::make(group_->shared_host(), static_cast<int>(i), static_cast<int>(choices.size()),
                             memory_tracker());
  if (child != nullptr) place = child->own_place();
  const std::vector<ShmGroup::MemberOffsets> places = collect(place);  // collective: ranks without a child take part
  if (child == nullptr) return nullptr;
  std::vector<ShmGroup::MemberOffsets> members;
  for (const Choice& choice : choices) members.push_back(places[static_cast<std::size_t>(choice.rank)]);
  child->connect(std::move(members));
  return std::make_unique<ShmCommunicator>(std::move(child), options(), false);
}

}  // namespace tessera::comm::shm
