// Messages with tags, and receives from any rank.
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tests/conformance/cases.h"

namespace tessera::conformance {
namespace {

using Values = std::vector<std::int64_t>;

constexpr std::size_t kCounts[] = {0, 3, 20'000, 300'000};  // none, eager, tiles, and by a rendezvous

View view(Values& values) { return view_of(values.data(), values.size()); }

Values message(int sender, int tag, std::size_t count) {
  return Values(count, static_cast<std::int64_t>(sender) * 1'000'000 + tag + static_cast<std::int64_t>(count));
}

/// What a call of a backend without tags, or without receives from any rank, throws.
std::string refused(Communicator& world, const OpOptions& options, int peer, const std::string& what) {
  Values data(1);
  try {
    world.recv(view(data), peer, options);
  } catch (const Unsupported& error) {
    const std::string said = error.what();
    return said.find(what) == std::string::npos ? "another error: " + said : "";
  }
  return "receiving with " + what + " was accepted";
}

/// Receives in another order than the sends: each gets the message of its tag, and of one tag the messages in order.
std::string tags(Communicator& world) {
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  if (!world.capabilities().message_tags) return refused(world, {.tag = 1}, previous, "tags other than 0");
  const std::vector<int> sent = {5, 0, kMaxTag, 5, 3};
  const std::vector<std::size_t> received = {4, 2, 1, 0, 3};  // places in `sent`: the two of tag 5 in their order
  for (const std::size_t count : kCounts)
    for (const bool batch : {false, true}) {
      std::vector<Values> out;
      std::vector<Values> in(sent.size());
      for (std::size_t i = 0; i < sent.size(); ++i) out.push_back(message(world.rank(), sent[i], count + i % 3));
      std::vector<Work> works;
      std::vector<P2POp> parts;
      for (std::size_t i = 0; i < sent.size(); ++i) {
        if (batch) parts.push_back(P2POp::send(view(out[i]), next, sent[i]));
        if (!batch) works.push_back(world.send(view(out[i]), next, {.tag = sent[i]}));
      }
      for (const std::size_t i : received) {
        in[i].assign(count + i % 3, -1);
        if (batch) {
          parts.push_back(P2POp::recv(view(in[i]), previous, sent[i]));
        } else {
          world.recv(view(in[i]), previous, {.tag = sent[i]}).wait();  // while the messages before it wait
        }
      }
      if (batch) works.push_back(world.batch(parts));
      for (Work& work : works) work.wait();
      for (std::size_t i = 0; i < sent.size(); ++i)
        if (in[i] != message(previous, sent[i], count + i % 3))
          return "message " + std::to_string(i) + " of " + std::to_string(count) + " elements is wrong";
    }
  return {};
}

/// Rank 0 receives from any rank what all others send, beside a receive from a certain one.
std::string any_source(Communicator& world) {
  if (!world.capabilities().any_source) return refused(world, {}, kAnyRank, "receiving from any rank");
  const int last = world.size() - 1;
  for (const std::size_t count : kCounts) {
    world.barrier().wait();  // a sender's next message could take the place of another sender's
    if (world.rank() != 0) {
      Values mine = message(world.rank(), 7, count);
      Values named = message(world.rank(), 8, count);
      Work first = world.send(view(mine), 0, {.tag = 7});
      if (world.rank() == last) world.send(view(named), 0, {.tag = 8}).wait();
      first.wait();
      continue;
    }
    struct Receive {
      Values data;
      int source = -1;
      Work work;
    };
    std::vector<Receive> receives(static_cast<std::size_t>(last));
    for (Receive& receive : receives) {
      receive.data.assign(count, -1);
      receive.work = world.recv(view(receive.data), kAnyRank, {.tag = 7, .source = &receive.source});
    }
    Values named(count);
    world.recv(view(named), last, {.tag = 8}).wait();
    if (named != message(last, 8, count)) return "the message of another tag is wrong";
    std::set<int> sources;
    for (Receive& receive : receives) {
      receive.work.wait();
      if (receive.data != message(receive.source, 7, count)) return "a message from any rank is wrong";
      sources.insert(receive.source);
    }
    if (sources.size() != receives.size()) return "two receives from any rank have the same sender";
  }
  return {};
}

std::string errors(Communicator& world) {
  if (!world.capabilities().message_tags) return {};
  Values data(1);
  for (const int tag : {-1, kMaxTag + 1}) {
    try {
      world.send(view(data), (world.rank() + 1) % world.size(), {.tag = tag});
      return "tag " + std::to_string(tag) + " was accepted";
    } catch (const InvalidUsage&) {
      continue;
    }
  }
  return {};
}

}  // namespace

std::vector<Behaviour> tag_behaviours() {
  return {{"tags", tags, 2}, {"from any rank", any_source, 2}, {"wrong tags", errors, 2}};
}

}  // namespace tessera::conformance
