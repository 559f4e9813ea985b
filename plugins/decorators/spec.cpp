#include "plugins/decorators/spec.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "plugins/decorators/delay.h"
#include "plugins/decorators/fault.h"
#include "plugins/decorators/trace.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"

namespace tessera::decorators {
namespace {

constexpr auto kMax = std::numeric_limits<std::int64_t>::max();

std::vector<std::string_view> split_at(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// One entry of the list: name:value,key=value,...
class Item {
 public:
  explicit Item(std::string_view text) : text_(text) {
    const std::size_t colon = std::min(text.find(':'), text.size());
    name_ = text.substr(0, colon);
    if (colon == text.size()) return;
    const std::vector<std::string_view> parts = split_at(text.substr(colon + 1), ',');
    value_ = parts.front();
    for (std::size_t i = 1; i < parts.size(); ++i) {
      const std::size_t equals = parts[i].find('=');
      if (equals == std::string_view::npos) fail("'" + std::string(parts[i]) + "' is not of the form key=value");
      settings_.emplace_back(parts[i].substr(0, equals), parts[i].substr(equals + 1));
    }
  }
  std::string_view name() const { return name_; }
  std::string_view value() const { return value_; }
  /// Removes a setting and returns its value; "" if it is absent.
  std::string_view extract(std::string_view key) {
    const auto found = std::find_if(settings_.begin(), settings_.end(), [&](const auto& s) { return s.first == key; });
    if (found == settings_.end()) return {};
    const std::string_view value = found->second;
    if (value.empty()) fail(std::string(key) + " has no value");
    settings_.erase(found);
    return value;
  }
  void expect_no_more() const {
    if (!settings_.empty()) fail("unknown or repeated setting '" + std::string(settings_.front().first) + "'");
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw InvalidUsage("decorator '" + std::string(text_) + "': " + what);
  }
  std::string what() const { return "decorator '" + std::string(text_) + "'"; }

 private:
  std::string_view text_;
  std::string_view name_;
  std::string_view value_;
  std::vector<std::pair<std::string_view, std::string_view>> settings_;
};

std::unique_ptr<Communicator> make_delay(std::unique_ptr<Communicator> inner, Item& item) {
  if (item.value().empty()) item.fail("needs a time, such as delay:2ms");
  DelayOptions options{.latency = parse_duration(item.value(), item.what())};
  if (const auto seed = item.extract("seed"); !seed.empty())
    options.seed = static_cast<std::uint64_t>(parse_integer(seed, item.what(), 0, kMax));
  if (const auto bandwidth = item.extract("bandwidth"); !bandwidth.empty()) {
    options.bytes_per_second = static_cast<double>(parse_size(bandwidth, item.what()));
    if (options.bytes_per_second <= 0) item.fail("bandwidth must be above 0");
  }
  if (const auto op = item.extract("op"); !op.empty()) options.only = parse_op_kind(op);
  item.expect_no_more();
  return std::make_unique<DelayDecorator>(std::move(inner), options);
}

std::unique_ptr<Communicator> make_fault(std::unique_ptr<Communicator> inner, Item& item) {
  static constexpr std::array<std::pair<std::string_view, FaultKind>, 3> kKinds = {
      {{"drop", FaultKind::drop}, {"kill", FaultKind::kill}, {"corrupt", FaultKind::corrupt}}};
  const std::vector<std::string_view> parts = split_at(item.value(), '@');
  const auto kind = std::find_if(kKinds.begin(), kKinds.end(), [&](const auto& k) { return k.first == parts.front(); });
  if (kind == kKinds.end() || parts.size() != 2) item.fail("needs drop@CALL, kill@CALL or corrupt@CALL");
  FaultOptions options{.kind = kind->second,
                       .call = static_cast<std::uint64_t>(parse_integer(parts[1], item.what(), 1, kMax))};
  if (const auto rank = item.extract("rank"); !rank.empty())
    options.rank = static_cast<int>(parse_integer(rank, item.what(), 0, inner->size() - 1));
  item.expect_no_more();
  return std::make_unique<FaultDecorator>(std::move(inner), options);
}

std::unique_ptr<Communicator> make_trace(std::unique_ptr<Communicator> inner, Item& item) {
  item.expect_no_more();
  const std::shared_ptr<Logger> logger = inner->logger();
  if (item.value().empty()) return std::make_unique<TraceDecorator>(std::move(inner), trace_to_log(logger));
  std::string path = std::string(item.value()) + ".rank" + std::to_string(inner->rank()) + ".json";
  return std::make_unique<TraceDecorator>(std::move(inner), trace_to_file(std::move(path), logger));
}

}  // namespace

std::unique_ptr<Communicator> decorate(std::unique_ptr<Communicator> communicator, std::string_view spec) {
  if (spec.empty()) return communicator;
  for (const std::string_view text : split_at(spec, ';')) {
    Item item(text);
    if (item.name() == "delay") {
      communicator = make_delay(std::move(communicator), item);
    } else if (item.name() == "fault") {
      communicator = make_fault(std::move(communicator), item);
    } else if (item.name() == "trace") {
      communicator = make_trace(std::move(communicator), item);
    } else {
      item.fail("unknown; known: delay fault trace");
    }
  }
  return communicator;
}

}  // namespace tessera::decorators
