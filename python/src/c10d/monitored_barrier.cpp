#include "c10d/monitored_barrier.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"

namespace tessera::c10d_backend {

using namespace std::chrono_literals;
namespace {

using Clock = std::chrono::steady_clock;

/// Rank 0 decides at its own deadline: the others wait this much longer for what it says.
constexpr auto kPatience = 2s;

constexpr const char* kPassed = "passed";

void write(::c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
}

std::string in_milliseconds(std::chrono::milliseconds time) { return std::to_string(time.count()) + " ms"; }

}  // namespace

void MonitoredBarrier::pass(std::chrono::milliseconds timeout, bool all_ranks, const std::function<void()>& check) {
  ++round_;
  if (rank_ == 0)
    lead(timeout, all_ranks, check);
  else
    follow(timeout, check);
}

/// Of rank 0: its result.
std::string MonitoredBarrier::key(std::uint64_t round, int rank) const {
  return "tessera/monitored_barrier/" + std::to_string(round) + "/" + std::to_string(rank);
}

bool MonitoredBarrier::wait_for(const std::vector<std::string>& keys, std::chrono::milliseconds timeout,
                                const std::function<void()>& check) const {
  const Clock::time_point until = base::deadline_after(timeout);
  for (Clock::duration pause = 1ms; !store_->check(keys); pause = std::min<Clock::duration>(2 * pause, 50ms)) {
    if (Clock::now() >= until) return false;
    check();
    std::this_thread::sleep_for(std::min(pause, std::max<Clock::duration>(until - Clock::now(), 1ms)));
  }
  return true;
}

void MonitoredBarrier::lead(std::chrono::milliseconds timeout, bool all_ranks,
                            const std::function<void()>& check) const {
  std::string problem;
  std::vector<std::string> others;
  for (int rank = 1; rank < size_; ++rank) others.push_back(key(round_, rank));
  if (timeout <= 0ms) {
    problem = "Rank 0 timed out in monitoredBarrier after " + in_milliseconds(timeout);
  } else if (!others.empty() && !wait_for(others, timeout, check)) {
    problem = describe_missing(all_ranks);
    if (!problem.empty()) problem += " failed to pass monitoredBarrier in " + in_milliseconds(timeout);
  }
  write(*store_, key(round_, 0), problem.empty() ? kPassed : problem);
  if (!problem.empty()) throw base::Timeout("monitored_barrier: " + problem);
  forget(round_ - 1);  // every rank has come here, and so has read that round's result
}

void MonitoredBarrier::follow(std::chrono::milliseconds timeout, const std::function<void()>& check) const {
  write(*store_, key(round_, rank_), kPassed);
  const std::string result = key(round_, 0);
  std::string problem;
  if (wait_for({result}, timeout + kPatience, check)) {
    const std::vector<std::uint8_t> text = store_->get(result);
    problem.assign(text.begin(), text.end());
    if (problem == kPassed) return;
  } else {
    problem = "Rank 0 failed to pass monitoredBarrier in " + in_milliseconds(timeout + kPatience);
  }
  throw base::Timeout("monitored_barrier: Rank " + std::to_string(rank_) +
                      " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                      "rank 0: " +
                      problem);
}

/// "Rank 1", "Ranks 1, 2", by their numbers in the group; "" if the last one has come by now.
std::string MonitoredBarrier::describe_missing(bool all_ranks) const {
  std::string names;
  int missing = 0;
  for (int rank = 1; rank < size_ && (all_ranks || missing == 0); ++rank)
    if (!store_->check({key(round_, rank)})) names += (missing++ > 0 ? ", " : "") + std::to_string(rank);
  if (missing == 0) return "";
  return (missing > 1 ? "Ranks " : "Rank ") + names;
}

/// A store that can't delete keys keeps these few bytes: the barrier has been passed.
void MonitoredBarrier::forget(std::uint64_t round) const {
  try {
    for (int rank = 0; round > 0 && rank < size_; ++rank) store_->deleteKey(key(round, rank));
  } catch (const std::exception&) {
  }
}

}  // namespace tessera::c10d_backend
