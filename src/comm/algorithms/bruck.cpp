// Bruck's algorithms: about log2(n) rounds for any number n of ranks.
#include <algorithm>

#include "tessera/comm/algorithms/algorithms.h"

namespace tessera::comm::schedules {

/// Before the round at distance d, each rank has the parts of the d ranks from itself upward along the ring; it sends
/// them to the rank d positions below. The parts are at their final places in `out`, in two ranges if they wrap around.
void bruck_all_gather(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const int ranks = builder.ranks();
  const auto& starts = spec.out_starts;
  const Slice own = part_of(spec, starts, builder.rank());
  std::vector<StepId> here = {builder.copy(builder.in({0, own.count}), builder.out(own), {}, spec.in_place)};
  for (int distance = 1; distance < ranks; distance *= 2) {
    const int parts = std::min(distance, ranks - distance);
    // The parts of `parts` ranks from `first` on, before and after the wrap-around.
    const auto stretches = [&](int first) {
      const int end = std::min(first + parts, ranks);
      return std::pair{builder.out(parts_of(spec, starts, first, end)),
                       builder.out(parts_of(spec, starts, 0, first + parts - end))};
    };
    const auto [send_1, send_2] = stretches(builder.rank());
    const int to = builder.around(-distance);
    for (const StepId sent : {builder.send(to, send_1), builder.send(to, send_2)})
      for (const StepId step : here) builder.wait(sent, step);
    const int from = builder.around(distance);
    const auto [receive_1, receive_2] = stretches(from);
    here.push_back(builder.receive(from, receive_1));
    here.push_back(builder.receive(from, receive_2));
  }
}

/// Block i must reach the rank i positions further. In the round at distance d, all blocks whose i has the bit d move
/// that far, packed into one message; so a block moves once for every bit set in its i. It stays in the message that
/// delivered it until it is packed again or copied to its place.
void bruck_all_to_all(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const int ranks = builder.ranks();
  struct Block {
    BufferRegion at;
    StepId here;
  };
  std::vector<Block> blocks;
  blocks.reserve(static_cast<std::size_t>(ranks));
  for (int i = 0; i < ranks; ++i)
    blocks.push_back({builder.in(part_of(spec, spec.in_starts, builder.around(i))), kNoStep});
  const std::size_t bytes = blocks.front().at.bytes;
  for (int distance = 1; distance < ranks; distance *= 2) {
    std::size_t moved = 0;
    for (int i = 0; i < ranks; ++i) moved += (i & distance) != 0 ? 1 : 0;
    const BufferRegion packed = builder.scratch(moved * bytes);
    const BufferRegion come = builder.scratch(moved * bytes);
    std::vector<StepId> copied;
    for (int i = 0; i < ranks; ++i)
      if ((i & distance) != 0) {
        const Block& block = blocks[static_cast<std::size_t>(i)];
        copied.push_back(builder.copy(block.at, sub_region(packed, copied.size() * bytes, bytes), {block.here}));
      }
    const StepId sent = builder.send(builder.around(distance), packed);
    for (const StepId step : copied) builder.wait(sent, step);
    const StepId received = builder.receive(builder.around(-distance), come);
    std::size_t next = 0;
    for (int i = 0; i < ranks; ++i)
      if ((i & distance) != 0)
        blocks[static_cast<std::size_t>(i)] = {sub_region(come, next++ * bytes, bytes), received};
  }
  // Block i is from the rank i positions back.
  for (int i = 0; i < ranks; ++i) {
    const Block& block = blocks[static_cast<std::size_t>(i)];
    builder.copy(block.at, builder.out(part_of(spec, spec.out_starts, builder.around(-i))), {block.here});
  }
}

}  // namespace tessera::comm::schedules
