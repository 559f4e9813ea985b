// Names that fsdp uses from the layers below.
#pragma once

#include "tessera/base/error.h"
#include "tessera/base/export.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/stream.h"
#include "tessera/base/trace.h"

/// The engine: strategies, units, checkpoints and cost formulas.
namespace tessera::fsdp {

using namespace base;  // NOLINT: one directory of this header's kind per layer

}  // namespace tessera::fsdp
