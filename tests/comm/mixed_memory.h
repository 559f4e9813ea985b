// Operations of every kind and size on memory of either kind, which may differ between the ranks: shm copies data,
// reads it from a process, moves it in rounds, or reads it in place.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::comm_test {

/// Small whole numbers, so that sums are exact.
inline float mixed_value(int rank, int step, std::size_t i) {
  return static_cast<float>((static_cast<std::size_t>(7 * rank + 3 * step) + i) % 61);
}

/// A buffer in a window or in ordinary memory.
class MixedBuffer {
 public:
  MixedBuffer(comm::Communicator& comm, std::size_t count, bool window) {
    if (window) {
      window_ = comm.allocate(std::max<std::size_t>(count, 1) * sizeof(float), comm::MemoryKind::host,
                              base::MemoryCategory::other);
      data_ = static_cast<float*>(window_.data());
    } else {
      ordinary_.resize(count);
      data_ = ordinary_.data();
    }
    std::fill_n(data_, count, -1.0f);
  }
  float* data() const { return data_; }

 private:
  base::Buffer window_;
  std::vector<float> ordinary_;
  float* data_ = nullptr;
};

/// One operation of a sequence that is the same on all ranks, except for the placement of its memory and for late
/// ranks.
class MixedStep {
 public:
  static constexpr std::array kKinds = {
      comm::OpKind::all_reduce, comm::OpKind::all_gather, comm::OpKind::reduce_scatter, comm::OpKind::broadcast,
      comm::OpKind::all_to_all, comm::OpKind::reduce,     comm::OpKind::gather,         comm::OpKind::scatter};

  MixedStep(comm::Communicator& comm, int step, comm::OpKind kind, std::size_t part, int root, bool in_window,
            bool out_window)
      : comm_(comm),
        step_(step),
        kind_(kind),
        root_(root),
        part_(part),
        in_(comm, in_count(), in_window),
        out_(comm, out_count(), out_window) {
    for (std::size_t i = 0; i < in_count(); ++i) in_.data()[i] = mixed_value(comm.rank(), step, i);
    work_ = start();
  }

  /// Waits, overwrites the input at once (no rank may still read it), and checks every value of the output.
  void finish() {
    work_.wait();
    std::fill_n(in_.data(), in_count(), std::numeric_limits<float>::quiet_NaN());
    for (std::size_t i = 0; i < out_count(); ++i) {
      const std::optional<float> wanted = expected(i);
      if (wanted && out_.data()[i] != *wanted)
        throw std::runtime_error("step " + std::to_string(step_) + ", " + std::string(comm::name_of(kind_)) +
                                 " of parts of " + std::to_string(part_) + ": element " + std::to_string(i) + " is " +
                                 std::to_string(out_.data()[i]) + ", not " + std::to_string(*wanted));
    }
  }

 private:
  std::size_t whole() const { return part_ * static_cast<std::size_t>(comm_.size()); }
  std::size_t in_count() const {
    return kind_ == comm::OpKind::all_gather || kind_ == comm::OpKind::gather ? part_ : whole();
  }
  std::size_t out_count() const {
    return kind_ == comm::OpKind::reduce_scatter || kind_ == comm::OpKind::scatter ? part_ : whole();
  }
  comm::Work start() {
    const comm::ConstView in = comm::view_of(static_cast<const float*>(in_.data()), in_count());
    const comm::View out = comm::view_of(out_.data(), out_count());
    switch (kind_) {
      case comm::OpKind::all_reduce:
        return comm_.all_reduce(in, out, comm::ReduceOp::sum());
      case comm::OpKind::all_gather:
        return comm_.all_gather(in, out);
      case comm::OpKind::reduce_scatter:
        return comm_.reduce_scatter(in, out, comm::ReduceOp::sum());
      case comm::OpKind::broadcast:
        return comm_.broadcast(in, out, root_);
      case comm::OpKind::all_to_all:
        return comm_.all_to_all(in, out);
      case comm::OpKind::reduce:
        return comm_.reduce(in, out, comm::ReduceOp::sum(), root_);
      case comm::OpKind::gather:
        return comm_.gather(in, out, root_);
      default:
        return comm_.scatter(in, out, root_);
    }
  }
  float sum(std::size_t i) const {
    float total = 0;
    for (int r = 0; r < comm_.size(); ++r) total += mixed_value(r, step_, i);
    return total;
  }
  /// nullopt if the operation leaves the output unchanged.
  std::optional<float> expected(std::size_t i) const {
    const auto mine = static_cast<std::size_t>(comm_.rank()) * part_;
    const int source = part_ == 0 ? 0 : static_cast<int>(i / part_);
    const bool is_root = comm_.rank() == root_;
    switch (kind_) {
      case comm::OpKind::all_reduce:
        return sum(i);
      case comm::OpKind::reduce_scatter:
        return sum(mine + i);
      case comm::OpKind::all_gather:
        return mixed_value(source, step_, i % part_);
      case comm::OpKind::broadcast:
        return mixed_value(root_, step_, i);
      case comm::OpKind::all_to_all:
        return mixed_value(source, step_, mine + i % part_);
      case comm::OpKind::reduce:
        return is_root ? std::optional(sum(i)) : std::nullopt;
      case comm::OpKind::gather:
        return is_root ? std::optional(mixed_value(source, step_, i % part_)) : std::nullopt;
      default:
        return mixed_value(root_, step_, mine + i);
    }
  }

  comm::Communicator& comm_;
  int step_;
  comm::OpKind kind_;
  int root_;
  std::size_t part_;
  MixedBuffer in_;
  MixedBuffer out_;
  comm::Work work_;
};

/// Runs `steps` operations, up to three of them in flight. Throws at the first wrong value.
inline void move_mixed_memory(comm::Communicator& comm, unsigned seed, int steps) {
  std::mt19937 common(seed);
  std::mt19937 own(seed * 1000 + static_cast<unsigned>(comm.rank()));
  // Sizes that fit beside the payload of a slot, need one round of a copy, need several, and exceed what is copied
  // whole.
  constexpr std::array<std::size_t, 8> kParts = {1, 300, 1500, 5000, 17'000, 40'000, 120'000, 400'000};
  std::vector<std::unique_ptr<MixedStep>> flying;
  for (int step = 0; step < steps; ++step) {
    const comm::OpKind kind = MixedStep::kKinds[common() % MixedStep::kKinds.size()];
    const std::size_t part = kParts[common() % kParts.size()];
    const int root = static_cast<int>(common() % static_cast<unsigned>(comm.size()));
    const std::size_t leave = common() % 3;
    if (own() % 4 == 0) ::usleep(own() % 300);  // not for ordering: ranks arrive at different times
    flying.push_back(std::make_unique<MixedStep>(comm, step, kind, part, root, own() % 2 == 0, own() % 2 == 0));
    while (flying.size() > leave) {
      flying.front()->finish();
      flying.erase(flying.begin());
    }
  }
  for (const auto& one : flying) one->finish();
}

}  // namespace tessera::comm_test
