#include "tessera/fsdp/precision.h"

#include <string>

#include "tessera/base/error.h"

namespace tessera::fsdp {

Precision make_precision(DType compute, std::optional<DType> reduce) {
  const Precision precision{compute, reduce.value_or(compute)};
  const auto name = [](DType dtype) { return std::string(base::name_of(dtype)); };
  if (compute != DType::f32 && compute != DType::bf16 && compute != DType::f16)
    throw base::Unsupported("precision: parameters of dtype " + name(compute) +
                            " are not supported; use f32, bf16 or f16");
  if (precision.casts() && precision.reduce != DType::f32)
    throw base::Unsupported("precision: gradients of " + name(compute) + " can't be reduced in " +
                            name(precision.reduce) + "; use " + name(compute) +
                            (precision.has_master_weights() ? " or f32" : ""));
  return precision;
}

}  // namespace tessera::fsdp
