// How many cores there are to compute on, which in a container are often fewer than the machine has.
#pragma once

#include <optional>
#include <string>

#include "tessera/base/export.h"

namespace tessera::base {

/// The processor time that the cgroups of a process allow, in cores: the smallest quota (cpu.max of version 2,
/// cpu.cfs_quota_us of version 1) along its paths. Empty: there is no quota. `processes`: the list of paths, in the
/// format of /proc/self/cgroup; `root`: where the cgroups are mounted. Throws nothing.
TESSERA_API std::optional<double> cpu_quota(const std::string& processes = "/proc/self/cgroup",
                                            const std::string& root = "/sys/fs/cgroup");

/// The cores of this host, or fewer if the quota is below, rounded up; at least 1. The affinity mask of this process
/// doesn't count, since a launcher may have bound it to a part of the cores that it and its neighbors share.
TESSERA_API int host_cores();

/// The cores that the affinity mask of this process allows, or fewer if the quota is below, rounded up; at least 1.
TESSERA_API int usable_cores();

}  // namespace tessera::base
