#include "tools/cli/host_load.h"

#include <sys/times.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>

namespace tessera::tools {

HostLoad::HostLoad() : start_(now()) {}

std::optional<HostLoad::Ticks> HostLoad::now() {
  std::ifstream file("/proc/stat");
  std::string word;
  std::array<double, 8> cores{};  // user, nice, system, idle, waiting for disks, interrupts, soft interrupts, stolen
  if (!(file >> word) || word != "cpu") return std::nullopt;
  for (double& ticks : cores)
    if (!(file >> ticks)) return std::nullopt;
  Ticks result;
  for (const double ticks : cores) result.all += ticks;
  result.busy = result.all - cores[3] - cores[4];
  tms own{};
  ::times(&own);
  result.own = static_cast<double>(own.tms_utime + own.tms_stime + own.tms_cutime + own.tms_cstime);
  return result;
}

std::optional<double> HostLoad::others_percent() const {
  const std::optional<Ticks> end = now();
  if (!start_ || !end || end->all <= start_->all) return std::nullopt;
  const double others = (end->busy - start_->busy) - (end->own - start_->own);
  return std::clamp(100 * others / (end->all - start_->all), 0.0, 100.0);
}

}  // namespace tessera::tools
