// Whether data that other ranks read is written past this core's caches.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tessera::comm::shm {

/// Memory that another core has read is in that core's caches, and a plain store must first invalidate it there, line
/// by line. That takes twice as long as the copy itself if the other core has the line in a cache of its own, and ten
/// times as long if the two cores have no cache in common: other sockets, other parts of a chip, or virtual cores that
/// were placed so for the moment. Streaming stores do not wait for it, but leave the data in memory, from where its
/// readers fetch it. So both kinds are timed, by what is written and by the size of the operation, and streaming ones
/// are used where they save enough; now and then the other kind is tried. The values written are the same. Used by one
/// thread at a time.
class StoreChoice {
 public:
  enum class Target : std::uint8_t { tile, copy, reduced_result, copied_result };

  /// `own_cores`: each rank has one. Ranks that share a core find each other's tiles in its caches.
  explicit StoreChoice(bool own_cores) : own_cores_(own_cores) {}

  /// Calls write_block(streams) for a block of `bytes` of an operation of `operation_bytes`.
  template <class Write>
  void write(Target target, std::size_t operation_bytes, std::size_t bytes, const Write& write_block) {
    if (bytes < kMinBytes) return write_block(false);
    const bool streams = next(target, operation_bytes);
    const auto begin = std::chrono::steady_clock::now();
    write_block(streams);
    const std::chrono::duration<float, std::nano> time = std::chrono::steady_clock::now() - begin;
    add(target, operation_bytes, streams, time.count() / static_cast<float>(bytes));
  }

  // The parts of write():
  /// Whether the next block is written with streaming stores.
  bool next(Target target, std::size_t operation_bytes) noexcept;
  /// Adds the time of a block, in ns a byte.
  void add(Target target, std::size_t operation_bytes, bool streams, float time) noexcept;

 private:
  static constexpr std::size_t kMinBytes = std::size_t{16} << 10;  ///< a look at the clock and a fence cost more
  static constexpr std::size_t kSizes = 33;                        ///< powers of 2; the last one and all above
  static constexpr std::size_t kKept = 3;                          ///< times: a rank may lose its core during one

  /// Of plain and of streaming stores.
  struct Times {
    std::array<std::array<float, kKept>, 2> last{};
    std::array<std::uint32_t, 2> count{};
    std::uint32_t blocks = 0;  ///< since both were timed
    bool streams = false;      ///< what is used
  };
  float needed_gain(Target target) const noexcept;
  Times& times_of(Target target, std::size_t operation_bytes) noexcept;

  const bool own_cores_;
  std::array<std::array<Times, kSizes>, 4> times_{};
};

}  // namespace tessera::comm::shm
