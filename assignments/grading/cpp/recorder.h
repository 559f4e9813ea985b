// A communicator that passes everything on and records the calls; it can also make the links slow, and fail.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace grading {

/// One operation that the student's code called.
struct Call {
  tessera::comm::OpKind kind;
  int peer = 0;                   ///< of send and recv; the root of rooted collectives
  const void* in = nullptr;       ///< what is sent
  std::size_t in_count = 0;       ///< in elements
  const void* out = nullptr;      ///< what is written
  std::size_t out_count = 0;      ///< in elements
  std::size_t element_bytes = 4;  ///< of one element
  bool sums = false;              ///< the reduction is a sum, not an average
  int mark = 0;                   ///< Recorder::set_mark()
};

/// Links that pass one operation after the other.
struct SlowLink {
  std::chrono::microseconds latency{0};
  double bytes_per_second = 1e12;
};

class Recorder final : public tessera::comm::Communicator {
 public:
  /// `inner` outlives it.
  explicit Recorder(tessera::comm::Communicator& inner);
  const tessera::comm::Capabilities& capabilities() const noexcept override { return inner_.capabilities(); }

  const std::vector<Call>& calls() const { return calls_; }  ///< since construction, or clear()
  void clear() { calls_.clear(); }
  void set_mark(int mark) { mark_ = mark; }            ///< recorded with the calls that follow
  void set_link(SlowLink link) { link_ = link; }       ///< of the calls that follow
  void fail_after(int calls) { calls_left_ = calls; }  ///< then this rank aborts, and its call throws

 private:
  tessera::comm::Work do_start(const tessera::comm::OpDesc& call) override;
  tessera::comm::Work do_batch(std::span<const tessera::comm::OpDesc> parts) override;
  std::unique_ptr<Communicator> do_split(int color, int key, const tessera::comm::SplitOptions& options) override;
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members,
                                                const tessera::comm::OpOptions& options) override;
  tessera::base::Buffer do_allocate(std::size_t bytes, tessera::comm::MemoryKind kind,
                                    std::optional<tessera::base::MemoryCategory> use) override;
  void do_abort(std::string_view reason) noexcept override;
  void do_traffic(tessera::comm::TrafficStats& snapshot) const override;

  void record(const tessera::comm::OpDesc& call);
  tessera::comm::Work slowed(tessera::comm::Work work, const tessera::comm::OpDesc& call);

  Communicator& inner_;
  std::vector<Call> calls_;
  int mark_ = 0;
  std::optional<int> calls_left_;
  std::optional<SlowLink> link_;
  std::chrono::steady_clock::time_point port_free_at_{};
};

}  // namespace grading
