#include "grading/cpp/fact.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace grading {
namespace {

using namespace tessera;

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

std::string number(double value) {
  if (std::isnan(value)) return "NaN";  // as Python reads them
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

std::ptrdiff_t offset_in(std::span<const float> memory, const void* data) {
  const auto* const first = static_cast<const float*>(data);
  const bool inside = first >= memory.data() && first <= memory.data() + memory.size();
  return inside ? first - memory.data() : -1;
}

}  // namespace

Fact& Fact::put(std::string_view key, const std::string& json) {
  body_ += (body_.empty() ? "" : ", ") + quoted(key) + ": " + json;
  return *this;
}

Fact& Fact::set(std::string_view key, double value) { return put(key, number(value)); }
Fact& Fact::set(std::string_view key, std::string_view text) { return put(key, quoted(text)); }

Fact& Fact::set(std::string_view key, std::span<const double> values) {
  std::string list;
  for (const double value : values) list += (list.empty() ? "" : ", ") + number(value);
  return put(key, "[" + list + "]");
}

Fact& Fact::set_calls(std::span<const Call> calls, std::span<const float> memory) {
  std::string list;
  for (const Call& call : calls) {
    list += (list.empty() ? "[" : ", [") + quoted(comm::name_of(call.kind));
    for (const auto value : {static_cast<std::ptrdiff_t>(call.peer), offset_in(memory, call.in),
                             static_cast<std::ptrdiff_t>(call.in_count), offset_in(memory, call.out),
                             static_cast<std::ptrdiff_t>(call.out_count), static_cast<std::ptrdiff_t>(call.mark)})
      list += ", " + std::to_string(value);
    list += "]";
  }
  const bool sums = std::any_of(calls.begin(), calls.end(), [](const Call& call) {
    return (call.kind == comm::OpKind::reduce_scatter || call.kind == comm::OpKind::all_reduce) && call.sums;
  });
  return put("calls", "[" + list + "]").set("sums", sums ? 1 : 0);
}

Fact& Fact::set_traffic(const comm::TrafficStats& traffic) {
  std::string kinds;
  for (std::size_t kind = 0; kind < comm::kOpKinds; ++kind) {
    const auto& counted = traffic.by_kind[kind];
    if (counted.calls == 0 && counted.bytes_sent == 0) continue;
    kinds += (kinds.empty() ? "" : ", ") + quoted(comm::name_of(static_cast<comm::OpKind>(kind))) + ": [" +
             std::to_string(counted.calls) + ", " + std::to_string(counted.bytes_sent) + "]";
  }
  const std::vector<double> peers(traffic.bytes_to_peer.begin(), traffic.bytes_to_peer.end());
  return put("traffic", "{" + kinds + "}").set("bytes_to_peer", peers);
}

}  // namespace grading
