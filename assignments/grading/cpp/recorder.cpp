#include "grading/cpp/recorder.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

namespace grading {
namespace {

using namespace tessera;
using comm::OpDesc, comm::Work;
using Clock = std::chrono::steady_clock;

/// Done when the operation is, and a point in time has come.
class DelayedWork final : public comm::WorkState {
 public:
  DelayedWork(Work inner, Clock::time_point end) : inner_(std::move(inner)), end_(end) {}
  bool done() noexcept override { return inner_.done() && Clock::now() >= end_; }
  bool wait_until(Clock::time_point until) override {
    if (!inner_.wait_until(until)) return false;
    std::this_thread::sleep_until(std::min(until, end_));
    return Clock::now() >= end_;
  }
  void wait() override {
    inner_.wait();
    std::this_thread::sleep_until(end_);
  }
  void on_done(comm::WorkCallback callback) override { inner_.on_done(std::move(callback)); }

 private:
  void recycle() noexcept override { delete this; }
  Work inner_;
  const Clock::time_point end_;
};

}  // namespace

Recorder::Recorder(Communicator& inner)
    : Communicator(inner.rank(), inner.size(), {inner.timeout(), inner.logger(), inner.memory_tracker()}),
      inner_(inner) {}

void Recorder::record(const OpDesc& call) {
  if (calls_left_ && (*calls_left_)-- <= 0) {
    inner_.abort("the grader made rank " + std::to_string(rank()) + " fail");
    throw base::Aborted("the grader made this rank fail");
  }
  calls_.push_back({.kind = call.kind,
                    .peer = call.root,
                    .in = call.in.data,
                    .in_count = call.in.count,
                    .out = call.out.data,
                    .out_count = call.out.count,
                    .element_bytes = size_of(call.in.count > 0 ? call.in.dtype : call.out.dtype),
                    .sums = call.op.kind == comm::ReduceOp::Kind::sum,
                    .mark = mark_});
}

Work Recorder::slowed(Work work, const OpDesc& call) {
  if (!link_ || size() == 1) return work;
  const std::size_t count = std::max(call.in.count, call.out.count);
  const auto bytes = static_cast<double>(comm::direct_bytes_sent(call.kind, count, 4, size(), rank()));
  const std::chrono::duration<double> occupied(bytes / link_->bytes_per_second);
  port_free_at_ = std::max(port_free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(occupied);
  return Work(new DelayedWork(std::move(work), port_free_at_ + link_->latency));
}

Work Recorder::do_start(const OpDesc& call) {
  record(call);
  return slowed(forward_to(inner_, call), call);
}

Work Recorder::do_batch(std::span<const OpDesc> parts) {
  for (const OpDesc& part : parts) record(part);
  return forward_to(inner_, parts);
}

std::unique_ptr<comm::Communicator> Recorder::do_split(int color, int key, const comm::SplitOptions& options) {
  return inner_.split(color, key, options);
}

std::unique_ptr<comm::Communicator> Recorder::do_create_group(std::span<const int> members,
                                                              const comm::OpOptions& options) {
  return inner_.create_group(members, options);
}

base::Buffer Recorder::do_allocate(std::size_t bytes, comm::MemoryKind kind, std::optional<base::MemoryCategory> use) {
  return inner_.allocate(bytes, kind, use);
}

void Recorder::do_abort(std::string_view reason) noexcept { inner_.abort(std::string(reason)); }

void Recorder::do_traffic(comm::TrafficStats& snapshot) const {
  const comm::TrafficStats moved = inner_.traffic();
  for (std::size_t kind = 0; kind < comm::kOpKinds; ++kind)
    snapshot.by_kind[kind].bytes_sent = moved.by_kind[kind].bytes_sent;
  snapshot.bytes_to_peer = moved.bytes_to_peer;
}

}  // namespace grading
