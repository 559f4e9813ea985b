// Names of base that nn uses.
#pragma once

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/base/export.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/shape.h"
#include "tessera/base/stream.h"

/// Tensors, modules, optimizers, data and models.
namespace tessera::nn {

using namespace base;  // NOLINT: one directory of this header's kind per layer

}  // namespace tessera::nn
