// Registers the collective plug-ins that the build links into the library beside `plain`: plugins/collectives.
#pragma once

#include "tessera/fsdp/collective_plugin.h"

namespace tessera::fsdp {

/// Adds them to `registry`; CollectiveRegistry::built_in() calls it.
void add_built_in_collectives(CollectiveRegistry& registry);

}  // namespace tessera::fsdp
