#include "tessera/comm/bootstrap.h"

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/rendezvous_store.h"

namespace tessera::comm {

Bootstrap::~Bootstrap() = default;
ControlChannel::~ControlChannel() = default;
RendezvousStore::~RendezvousStore() = default;

std::vector<std::shared_ptr<void>> Bootstrap::all_gather_objects(std::shared_ptr<void>) {
  throw Unsupported("bootstrap: these ranks are not threads of one process");
}

void Bootstrap::all_gather_fds(std::span<const int>, const UseDescriptors&) {
  throw Unsupported("bootstrap: these ranks are not on one host");
}

std::vector<int> Bootstrap::route(int) const { return {}; }

std::vector<std::string> exchange(Bootstrap& bootstrap, const std::function<std::string()>& make) {
  std::string blob = "+";
  try {
    blob += make();
  } catch (const Error& error) {
    blob = "-" + std::string(error.kind()) + "\n" + error.what();
  }
  std::vector<std::string> blobs = bootstrap.all_gather(blob);
  const bool equal = std::ranges::adjacent_find(blobs, std::not_equal_to<>()) == blobs.end();
  for (std::size_t r = 0; r < blobs.size(); ++r) {
    if (blobs[r].starts_with('-')) {
      const std::size_t end = std::min(blobs[r].find('\n'), blobs[r].size() - 1);
      throw_error(blobs[r].substr(1, end - 1),
                  (equal ? "" : "rank " + std::to_string(r) + ": ") + printable(blobs[r].substr(end + 1)));
    }
    blobs[r].erase(0, 1);
  }
  return blobs;
}

std::string by_value(std::span<const std::string> values, std::span<const int> global_ranks) {
  constexpr std::size_t kBefore = 20;  // characters shown before the first difference
  constexpr std::size_t kMost = 80;
  std::size_t same = values.empty() ? 0 : values.front().size();
  std::map<std::string, std::vector<int>> ranks_of;
  for (std::size_t r = 0; r < values.size(); ++r) {
    const auto differs =
        std::mismatch(values[r].begin(), values[r].end(), values.front().begin(), values.front().end());
    same = std::min(same, static_cast<std::size_t>(differs.first - values[r].begin()));
    ranks_of[values[r]].push_back(global_ranks.empty() ? static_cast<int>(r) : global_ranks[r]);
  }
  const std::size_t from = same > 2 * kBefore ? same - kBefore : 0;
  std::string all;
  for (const auto& [value, ranks] : ranks_of) {
    if (!all.empty()) all += "; ";
    all += value.empty() ? "unset" : (from > 0 ? "..." : "") + printable(value.substr(from, kMost));
    if (value.size() - from > kMost) all += "...";
    all += ranks.size() == 1 ? " on rank " : " on ranks ";
    for (std::size_t i = 0; i < ranks.size();) {
      std::size_t end = i + 1;
      while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
      if (end - i < 3) end = i + 1;
      all += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
      if (end - i > 1) all += "-" + std::to_string(ranks[end - 1]);
      i = end;
    }
  }
  return all;
}

void require_alike(Bootstrap& bootstrap, const std::function<std::vector<SharedSetting>()>& own,
                   std::span<const int> global_ranks) {
  // Of this rank. Those of another version may differ: then its number does, which comes first.
  std::vector<std::string> names;
  const std::vector<std::string> blobs = exchange(bootstrap, [&] {
    std::string all;
    for (const SharedSetting& setting : own()) {
      names.push_back(setting.name);
      all += setting.value + '\0';
    }
    return all;
  });
  std::vector<std::string_view> rest(blobs.begin(), blobs.end());
  std::string differences;
  for (const std::string& name : names) {
    std::vector<std::string> values;
    for (std::string_view& one : rest) {
      const std::size_t end = std::min(one.find('\0'), one.size());
      values.emplace_back(one.substr(0, end));
      one.remove_prefix(std::min(end + 1, one.size()));
    }
    if (std::ranges::adjacent_find(values, std::not_equal_to<>()) != values.end())
      differences += (differences.empty() ? "init: " : ", and ") + name + " differs between the ranks: it is " +
                     by_value(values, global_ranks);
  }
  if (!differences.empty()) throw InvalidUsage(differences + "; choose the same on all ranks");
}

void require_one_host(const Bootstrap& bootstrap, std::string_view what, std::string_view advice) {
  const std::vector<std::string>& hosts = bootstrap.hosts();
  for (std::size_t r = 1; r < hosts.size(); ++r) {
    if (hosts[r] == hosts[0]) continue;
    throw InvalidUsage(std::string(what) + " needs all ranks on one host: rank " + std::to_string(r) + " is on host " +
                       printable(hosts[r]) + ", rank 0 on " + printable(hosts[0]) + std::string(advice));
  }
}

}  // namespace tessera::comm
