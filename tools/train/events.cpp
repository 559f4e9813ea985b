#include "tools/train/events.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "tools/cli/output.h"

namespace tessera::tools {

std::vector<std::string> gather_texts(comm::HostCollectives& control, const std::string& own) {
  const std::vector<std::uint64_t> length = {own.size()};
  std::vector<std::size_t> counts;
  for (const auto& rank : control.gather_all(length)) counts.push_back(rank[0]);
  std::string all(std::accumulate(counts.begin(), counts.end(), std::size_t{0}), ' ');
  const comm::ConstView in{own.data(), own.size(), base::DType::u8, {}};
  const comm::View out{all.data(), all.size(), base::DType::u8, {}};
  control.exchange(in, out, [&](comm::ConstView from, comm::View to, comm::OpOptions options) {
    return control.communicator().all_gather_v(from, to, counts, options);
  });
  std::vector<std::string> texts;
  std::size_t position = 0;
  for (const std::size_t count : counts) {
    texts.push_back(all.substr(position, count));
    position += count;
  }
  return texts;
}

// Sent as text: unit names vary in length, and this runs only once.
std::vector<base::TraceEvent> gather_events(comm::HostCollectives& control, const std::vector<base::TraceEvent>& own) {
  nlohmann::json mine = nlohmann::json::array();
  for (const base::TraceEvent& e : own)
    mine.push_back({static_cast<int>(e.kind), e.unit, e.rank, e.bytes, e.start_ns, e.end_ns});
  std::vector<base::TraceEvent> events;
  for (const std::string& text : gather_texts(control, json_text(mine)))
    for (const auto& e : nlohmann::json::parse(text))
      events.push_back({static_cast<base::TraceEventKind>(e[0].get<int>()), e[1], e[2], e[3], e[4], e[5]});
  return events;
}

}  // namespace tessera::tools
