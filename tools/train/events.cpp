#include "tools/train/events.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "tools/cli/output.h"

namespace tessera::tools {

// Sent as text: unit names vary in length, and this runs only once.
std::vector<base::TraceEvent> gather_events(comm::HostCollectives& control, const std::vector<base::TraceEvent>& own) {
  nlohmann::json mine = nlohmann::json::array();
  for (const base::TraceEvent& e : own)
    mine.push_back({static_cast<int>(e.kind), e.unit, e.rank, e.bytes, e.start_ns, e.end_ns});
  const std::string text = json_text(mine);
  const std::vector<std::uint64_t> length = {text.size()};
  std::vector<std::size_t> counts;
  for (const auto& rank : control.gather_all(length)) counts.push_back(rank[0]);
  std::vector<std::uint8_t> all(std::accumulate(counts.begin(), counts.end(), std::size_t{0}));
  const comm::ConstView in{text.data(), text.size(), base::DType::u8, {}};
  control.exchange(in, comm::view_of(all.data(), all.size()),
                   [&](comm::ConstView from, comm::View to, comm::OpOptions options) {
                     return control.communicator().all_gather_v(from, to, counts, options);
                   });
  std::vector<base::TraceEvent> events;
  const char* position = reinterpret_cast<const char*>(all.data());
  for (const std::size_t count : counts) {
    for (const auto& e : nlohmann::json::parse(position, position + count))
      events.push_back({static_cast<base::TraceEventKind>(e[0].get<int>()), e[1], e[2], e[3], e[4], e[5]});
    position += count;
  }
  return events;
}

}  // namespace tessera::tools
