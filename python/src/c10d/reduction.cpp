#include "c10d/reduction.h"

#include <c10/util/Exception.h>

#include <string>

#include "c10d/tensor_device.h"
#include "c10d/torch_version.h"

namespace tessera::c10d_backend {
namespace {

using RedOp = ::c10d::ReduceOp::RedOpType;

const char* name_of(RedOp op) {
  static constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op < RedOp::UNUSED ? kNames[op] : "an unknown reduction";
}

[[noreturn]] void refuse(RedOp op, at::ScalarType type) {
  C10_THROW_ERROR(NotImplementedError,
                  std::string("tessera: ") + name_of(op) + " of " + c10::toString(type) + " is not supported");
}

double factor_of(const ::c10d::ReduceOp& op) {
  const auto* given = dynamic_cast<const PreMulSum*>(op.supplement_.get());
  if (given == nullptr) C10_THROW_ERROR(ValueError, "tessera: PREMUL_SUM without a factor");
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor;
}

comm::ReduceOp op_of(const ::c10d::ReduceOp& given, at::ScalarType type) {
  switch (static_cast<RedOp>(given.op_)) {
    case RedOp::SUM:
      return comm::ReduceOp::sum();
    case RedOp::AVG:
      return comm::ReduceOp::avg();
    case RedOp::PRODUCT:
      return comm::ReduceOp::prod();
    case RedOp::MIN:
      return comm::ReduceOp::min();
    case RedOp::MAX:
      return comm::ReduceOp::max();
    case RedOp::BAND:
      return comm::ReduceOp::bit_and();
    case RedOp::BOR:
      return comm::ReduceOp::bit_or();
    case RedOp::BXOR:
      return comm::ReduceOp::bit_xor();
    case RedOp::PREMUL_SUM:
      return comm::ReduceOp::premul_sum(factor_of(given));
    default:
      refuse(given.op_, type);
  }
}

}  // namespace

Reduction Reduction::of(const ::c10d::ReduceOp& given, at::ScalarType type) {
  Reduction reduction{.op = op_of(given, type)};
  const bool complex = c10::isComplexType(type);
  if (complex && given.op_ != RedOp::SUM && given.op_ != RedOp::AVG && given.op_ != RedOp::PREMUL_SUM)
    refuse(given.op_, type);
  const auto dtype = dtype_of(complex ? c10::toRealValueType(type) : type);
  if (!dtype || !comm::is_defined(reduction.op.kind, *dtype)) refuse(given.op_, type);
  reduction.dtype = *dtype;
  reduction.per_element = complex ? 2 : 1;
  return reduction;
}

comm::View Reduction::view(const at::Tensor& contiguous) const {
  return {contiguous.mutable_data_ptr(), static_cast<std::size_t>(contiguous.numel()) * per_element, dtype,
          device_of(contiguous.device())};
}

}  // namespace tessera::c10d_backend
