#include "tools/cli/quantities.h"

#include <charconv>
#include <cmath>
#include <optional>
#include <span>
#include <string>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

constexpr Unit kCounts[] = {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"B", 1e9}, {"T", 1e12}};
constexpr Unit kMicroseconds[] = {{"ns", 1e-3}, {"us", 1}, {"ms", 1e3}, {"s", 1e6}};
constexpr Unit kRates[] = {{"B/s", 1},          {"kB/s", 1e3},       {"MB/s", 1e6},       {"GB/s", 1e9},
                           {"TB/s", 1e12},      {"bit/s", 1.0 / 8},  {"kbit/s", 1e3 / 8}, {"Mbit/s", 1e6 / 8},
                           {"Gbit/s", 1e9 / 8}, {"Tbit/s", 1e12 / 8}};
constexpr Unit kBytes[] = {{"B", 1},           {"kB", 1e3},           {"MB", 1e6},
                           {"GB", 1e9},        {"TB", 1e12},          {"KiB", 1024.0},
                           {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}};
constexpr Unit kFlops[] = {{"FLOP/s", 1},    {"kFLOP/s", 1e3},  {"MFLOP/s", 1e6},
                           {"GFLOP/s", 1e9}, {"TFLOP/s", 1e12}, {"PFLOP/s", 1e15}};

/// A number that is not negative, directly followed by one of the units; nothing if the text is not that.
std::optional<double> quantity(std::string_view text, std::span<const Unit> units) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || !std::isfinite(number) || std::signbit(number)) return {};
  const std::string_view name(stop, static_cast<std::size_t>(end - stop));
  for (const Unit& unit : units)
    if (unit.name == name && std::isfinite(number * unit.factor)) return number * unit.factor;
  return {};
}

[[noreturn]] void refuse(std::string_view text, std::string_view what, std::string_view expected) {
  throw base::InvalidUsage(std::string(what) + ": '" + std::string(text) + "' is not " + std::string(expected));
}

double at_least(double least, std::string_view text, std::span<const Unit> units, std::string_view what,
                std::string_view expected) {
  const std::optional<double> value = quantity(text, units);
  if (!value || *value < least) refuse(text, what, expected);
  return *value;
}

// Times are counted in nanoseconds of 64 bits, 292 years: what would take longer is refused.
constexpr double kLeastRate = 1e3;       // B/s
constexpr double kLeastFlops = 1e6;      // a second
constexpr double kLongestLatency = 1e9;  // us

/// "100ns", "20us", "1.5ms" or "2s" in microseconds; may be zero.
double parse_latency(std::string_view text, std::string_view what) {
  const std::optional<double> value = quantity(text, kMicroseconds);
  if (!value || *value > kLongestLatency) refuse(text, what, "a latency of 1000s or less; write 500ns, 20us or 1ms");
  return *value;
}

}  // namespace

std::int64_t parse_count(std::string_view text, std::string_view what) {
  constexpr double kMax = 1e15;  // doubles are exact up to here
  const std::optional<double> value = quantity(text, kCounts);
  const double whole = value ? std::round(*value) : 0;
  // 120.576K is whole, but not exactly so in binary.
  if (!value || whole < 1 || whole > kMax || std::abs(*value - whole) > 1e-12 * whole)
    refuse(text, what, "a whole number from 1 to 1e15; write 7500000000, 7.5e9, 7.5B or 124M");
  return static_cast<std::int64_t>(whole);
}

double parse_rate(std::string_view text, std::string_view what) {
  return at_least(kLeastRate, text, kRates, what, "a rate of 1kB/s or more; write 100MB/s, 1.25GB/s or 1Gbit/s");
}

double parse_bytes(std::string_view text, std::string_view what) {
  return at_least(1, text, kBytes, what, "an amount of memory above zero; write 80GB, 512MB or 24GiB");
}

LinkSpec parse_link(std::string_view text, std::string_view what) {
  const std::size_t comma = text.find(',');
  if (comma != std::string_view::npos)
    return {parse_latency(text.substr(0, comma), what), parse_rate(text.substr(comma + 1), what)};
  return {0, at_least(kLeastRate, text, kRates, what,
                      "a link; write LATENCY,RATE such as 20us,100MB/s, or a rate such as 1Gbit/s")};
}

double parse_flops(std::string_view text, std::string_view what) {
  return at_least(kLeastFlops, text, kFlops, what, "a speed of 1MFLOP/s or more; write 50GFLOP/s or 312TFLOP/s");
}

MachineSpec parse_machine(std::string_view text, std::string_view what) {
  const std::size_t comma = text.find(',');
  if (comma == std::string_view::npos) refuse(text, what, "a machine; write FLOPS,BYTES such as 50GFLOP/s,10GB/s");
  return {parse_flops(text.substr(0, comma), what), parse_rate(text.substr(comma + 1), what)};
}

}  // namespace tessera::tools
