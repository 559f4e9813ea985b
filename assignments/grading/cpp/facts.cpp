#include "grading/cpp/facts.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"

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
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

std::string folder() {
  const char* const given = std::getenv("GRADE_DIR");
  return given == nullptr ? "." : given;
}

std::ptrdiff_t offset_in(std::span<const float> memory, const void* data) {
  const auto* const first = static_cast<const float*>(data);
  const bool inside = first >= memory.data() && first <= memory.data() + memory.size();
  return inside ? first - memory.data() : -1;
}

/// The name of an error of the library, else "exception".
std::string kind_of(const std::exception& error) {
  if (dynamic_cast<const base::Timeout*>(&error) != nullptr) return "Timeout";
  if (dynamic_cast<const base::Aborted*>(&error) != nullptr) return "Aborted";
  if (dynamic_cast<const base::PeerLost*>(&error) != nullptr) return "PeerLost";
  if (dynamic_cast<const base::InvalidUsage*>(&error) != nullptr) return "InvalidUsage";
  if (dynamic_cast<const base::Mismatch*>(&error) != nullptr) return "Mismatch";
  return "exception";
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

Grading::Grading() : world_(comm::init()) {}

void Grading::run(const Case& part, const std::function<void(Recorder&, Fact&)>& body) {
  if (stopped_) return;
  const bool takes_part = world_->rank() < part.ranks;
  const auto group = world_->split(takes_part ? 0 : -1, world_->rank());
  int timed_out = 0;
  if (takes_part) {
    Fact fact;
    fact.set("case", part.name).set("says", part.says).set("rank", group->rank()).set("ranks", part.ranks);
    try {
      Recorder recorder(*group);
      body(recorder, fact);
      fact.set("status", "ok");
    } catch (const std::exception& error) {
      timed_out = dynamic_cast<const base::Timeout*>(&error) != nullptr ? 1 : 0;
      fact.set("status", "error").set("kind", kind_of(error)).set("error", kind_of(error) + ": " + error.what());
      group->abort("rank " + std::to_string(group->rank()) + " threw an exception");
    }
    std::ofstream file(folder() + "/rank" + std::to_string(world_->rank()) + ".jsonl", std::ios::app);
    file << fact.text() << std::endl;
  }
  const comm::View flag = comm::view_of(&timed_out, 1);
  world_->all_reduce(flag, flag, comm::ReduceOp::max(), {.timeout = std::chrono::seconds(50)}).wait();
  stopped_ = timed_out != 0;
}

void Grading::write_floats(Fact& fact, const Case& part, std::string_view key, std::span<const float> values) const {
  const std::string name = part.name + "." + std::string(key) + "." + std::to_string(world_->rank()) + ".f32";
  std::ofstream file(folder() + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size_bytes()));
  fact.set(key, name);
}

int run_grading(const std::function<void(Grading&)>& body) {
  try {
    Grading grading;
    body(grading);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}

}  // namespace grading
