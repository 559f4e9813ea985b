#include "backends/nccl/reduce_op.h"

#include <array>
#include <cstring>

namespace tessera::comm::nccl {

ncclDataType_t vendor_type(DType dtype) {
  constexpr std::array<ncclDataType_t, kDTypes.size()> kTypes = {ncclFloat32, ncclFloat64, ncclFloat16, ncclBfloat16,
                                                                 ncclInt8,    ncclUint8,   ncclInt32,   ncclInt64,
                                                                 ncclUint32,  ncclUint64,  ncclFloat16, ncclUint8};
  return kTypes[static_cast<std::size_t>(dtype)];
}

bool has_vendor_op(ReduceOp::Kind kind, DType dtype) {
  if (dtype == DType::boolean) return kind != ReduceOp::Kind::bit_xor;
  return dtype != DType::i16 && kind < ReduceOp::Kind::bit_and;
}

namespace {

/// `factor` as an element.
std::array<std::byte, 8> scalar_of(DType dtype, double factor) {
  std::array<std::byte, 8> bytes{};
  const auto put = [&](auto value) { std::memcpy(bytes.data(), &value, sizeof(value)); };
  switch (dtype) {
    case DType::f32:
      put(static_cast<float>(factor));
      break;
    case DType::f64:
      put(factor);
      break;
    case DType::f16:
      put(f16(static_cast<float>(factor)));
      break;
    case DType::bf16:
      put(bf16(static_cast<float>(factor)));
      break;
    default:  // little-endian: the low bytes are the element, as in the other backends' arithmetic
      put(static_cast<std::int64_t>(factor));
  }
  return bytes;
}

}  // namespace

NcclReduceOp::NcclReduceOp(const LaunchTarget& target, const ReduceOp& op, DType dtype) : target_(target) {
  switch (op.kind) {  // has_vendor_op(): bits are those of bool
    case ReduceOp::Kind::sum:
      op_ = dtype == DType::boolean ? ncclMax : ncclSum;
      break;
    case ReduceOp::Kind::prod:
      op_ = ncclProd;
      break;
    case ReduceOp::Kind::min:
      op_ = ncclMin;
      break;
    case ReduceOp::Kind::max:
      op_ = ncclMax;
      break;
    case ReduceOp::Kind::avg:
      if (op.scalar == target.size) {
        op_ = ncclAvg;
      } else if (op.scalar == 1) {
        op_ = ncclSum;
      } else {
        create(1 / op.scalar, dtype);
      }
      break;
    case ReduceOp::Kind::premul_sum:
      create(op.scalar, dtype);
      break;
    case ReduceOp::Kind::bit_and:
      op_ = ncclMin;
      break;
    case ReduceOp::Kind::bit_or:
      op_ = ncclMax;
      break;
    case ReduceOp::Kind::bit_xor:
      break;
  }
}

NcclReduceOp::~NcclReduceOp() {
  if (owned_) target_.api.ncclRedOpDestroy(op_, target_.comm);
}

void NcclReduceOp::create(double factor, DType dtype) {
  std::array<std::byte, 8> scalar = scalar_of(dtype, factor);
  check(target_.api.ncclRedOpCreatePreMulSum(&op_, scalar.data(), vendor_type(dtype), ncclScalarHostImmediate,
                                             target_.comm),
        "ncclRedOpCreatePreMulSum");
  owned_ = true;
}

}  // namespace tessera::comm::nccl
