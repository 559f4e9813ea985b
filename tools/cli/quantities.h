// Quantities with units in options: numbers of parameters, links between ranks, and speeds of a machine. Units are
// powers of ten.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::tools {

/// One direction of a link.
struct LinkSpec {
  double latency_us = 0;
  double bytes_per_second = 0;
  bool operator==(const LinkSpec&) const = default;
};

/// What one rank computes.
struct MachineSpec {
  double flops = 0;             ///< floating-point operations per second, of products
  double bytes_per_second = 0;  ///< of memory, for everything else
  bool operator==(const MachineSpec&) const = default;
};

/// Parses "7500000000", "7.5e9", "7.5B", "124M", "10K" or "1T": a whole number from 1 to 1e15. Throws InvalidUsage that
/// names `what`, as all of these do.
std::int64_t parse_count(std::string_view text, std::string_view what);

/// Parses "20MB/s", "1.25GB/s", "800kB/s" or "1Gbit/s"; above zero. Returns bytes per second.
double parse_rate(std::string_view text, std::string_view what);

/// Parses "80GB", "512MB" or "24GiB"; above zero. Returns bytes.
double parse_bytes(std::string_view text, std::string_view what);

/// Parses "20us,100MB/s", or a rate alone, which has no latency.
LinkSpec parse_link(std::string_view text, std::string_view what);

/// Parses "50GFLOP/s" or "312TFLOP/s"; above zero. Returns operations per second.
double parse_flops(std::string_view text, std::string_view what);

/// Parses "50GFLOP/s,10GB/s".
MachineSpec parse_machine(std::string_view text, std::string_view what);

}  // namespace tessera::tools
