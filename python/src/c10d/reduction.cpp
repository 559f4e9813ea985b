#include "c10d/reduction.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <string>

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
  const auto* given = dynamic_cast<const ::c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (given == nullptr) C10_THROW_ERROR(ValueError, "tessera: PREMUL_SUM without a factor");
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor;
}

base::DType dtype_of(RedOp op, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return base::DType::f32;
    case at::kDouble:
    case at::kComplexDouble:
      return base::DType::f64;
    case at::kHalf:
      return base::DType::f16;
    case at::kBFloat16:
      return base::DType::bf16;
    case at::kChar:
      return base::DType::i8;
    case at::kByte:
    case at::kBool:
      return base::DType::u8;
    case at::kInt:
      return base::DType::i32;
    case at::kLong:
      return base::DType::i64;
    default:
      refuse(op, type);
  }
}

comm::ReduceOp of_booleans(RedOp op) {
  switch (op) {
    case RedOp::SUM:
    case RedOp::MAX:
    case RedOp::BOR:
      return comm::ReduceOp::max();
    case RedOp::PRODUCT:
    case RedOp::MIN:
    case RedOp::BAND:
      return comm::ReduceOp::min();
    case RedOp::BXOR:
      return comm::ReduceOp::sum();
    default:
      refuse(op, at::kBool);
  }
}

}  // namespace

Reduction Reduction::of(const ::c10d::ReduceOp& given, at::ScalarType type) {
  const RedOp op = given.op_;
  Reduction reduction;
  reduction.dtype = dtype_of(op, type);
  const bool complex = c10::isComplexType(type);
  reduction.per_element = complex ? 2 : 1;
  if (type == at::kBool) {
    reduction.op = of_booleans(op);
    reduction.parity = op == RedOp::BXOR;
    return reduction;
  }
  if (complex && op != RedOp::SUM && op != RedOp::AVG && op != RedOp::PREMUL_SUM) refuse(op, type);
  switch (op) {
    case RedOp::SUM:
      reduction.op = comm::ReduceOp::sum();
      break;
    case RedOp::AVG:
      reduction.op = comm::ReduceOp::avg();
      break;
    case RedOp::PRODUCT:
      reduction.op = comm::ReduceOp::prod();
      break;
    case RedOp::MIN:
      reduction.op = comm::ReduceOp::min();
      break;
    case RedOp::MAX:
      reduction.op = comm::ReduceOp::max();
      break;
    case RedOp::PREMUL_SUM:
      reduction.op = comm::ReduceOp::premul_sum(factor_of(given));
      break;
    default:
      refuse(op, type);
  }
  return reduction;
}

comm::View Reduction::view(const at::Tensor& contiguous) const {
  return {contiguous.mutable_data_ptr(), static_cast<std::size_t>(contiguous.numel()) * per_element, dtype, {}};
}

void Reduction::end(const at::Tensor& result, Holding& holding) const {
  if (!parity) return;
  // Before copies of the result, which were added earlier.
  holding.at_end.insert(holding.at_end.begin(), [result] {
    at::Tensor bytes = result.view(at::kByte);
    bytes.bitwise_and_(1);
  });
}

}  // namespace tessera::c10d_backend
