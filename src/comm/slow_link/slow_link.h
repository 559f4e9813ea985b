// A decorator that makes the links between ranks slower, by a model of their ports.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// One direction of a link between two ranks.
struct SlowLink {
  std::chrono::nanoseconds latency{};
  double bytes_per_second = 0;  ///< above 0
};

/// The links of all ranks: they form `hosts` equal groups of consecutive ranks.
struct SlowLinks {
  SlowLink link;        ///< between hosts, or with one host between any two ranks
  SlowLink intra;       ///< between ranks of one host; unused with one host
  int hosts = 1;        ///< divides the number of ranks
  bool record = false;  ///< keeps what take_record() returns
};

/// An operation that a rank called.
struct LinkCall {
  std::int64_t called_ns = 0;    ///< of the steady clock
  std::int64_t occupied_ns = 0;  ///< its bytes at the rate of each class of link, summed
  std::int64_t latency_ns = 0;   ///< of its messages in a row
};

/// A rank's wait for an operation. Times are of the steady clock.
struct LinkWait {
  std::int64_t begin_ns = 0;
  std::int64_t all_called_ns = 0;  ///< when the last of the ranks that it waits for had called the operation
  std::int64_t through_ns = 0;     ///< when the links had passed it
  std::int64_t end_ns = 0;
};

/// What one rank did over slow links, in this order.
struct LinkRecord {
  std::vector<LinkCall> calls;
  std::vector<LinkWait> waits;
};

/// How late a rank woke up that slept until a transfer was through: of its latest 4,096 transfers.
struct Lateness {
  double median_us = 0;
  double percent = 0;        ///< of the median transfer's time
  bool shared_calls = true;  ///< false: each rank counts a transfer from its own call
};

/// Wraps the world and all that is split from it, on the host's memory only. Each rank has a port for each class of
/// link. An operation occupies it for its bytes to (or from, if those are more) peers of that class under the direct
/// algorithms, over the rate, first come, first served over all communicators of the rank; the latency of each of its
/// messages in a row follows, while the next operation may occupy the port. The operation itself starts at once, and is
/// done when the inner one is and its time has come; sends and receives count from this rank's call. Results, calls
/// and bytes are unchanged. An error is not delayed, and a failure ends the wait. An operation that needs longer than
/// its timeout fails. Collective.
TESSERA_API std::unique_ptr<Communicator> slow_links(std::unique_ptr<Communicator> world, const SlowLinks& links);

/// Of this rank, over all communicators of the same world; percent is 0 if it never slept. Throws InvalidUsage for
/// other communicators.
TESSERA_API Lateness lateness_of(const Communicator& communicator);

/// What this rank did since the last call of this function, over all communicators of the same world; empty unless
/// SlowLinks::record. Throws InvalidUsage for other communicators.
TESSERA_API LinkRecord take_record(const Communicator& communicator);

}  // namespace tessera::comm
