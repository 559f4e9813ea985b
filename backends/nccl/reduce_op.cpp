#include "backends/nccl/reduce_op.h"

#include <array>
#include <cstring>
#include <type_traits>

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
  base::with_dtype(dtype, [&]<class T>(T) {
    if constexpr (std::is_integral_v<T>)  // little-endian: the low bytes are the element, as in other backends' sums
      put(static_cast<std::int64_t>(factor));
    else if constexpr (std::is_same_v<T, double>)
      put(factor);
    else
      put(T(static_cast<float>(factor)));
  });
  return bytes;
}

}  // namespace

NcclReduceOp::NcclReduceOp(const LaunchTarget& target, const ReduceOp& op, DType dtype) : target_(target) {
  using Kind = ReduceOp::Kind;
  // By kind. Bits are those of bool; has_vendor_op() leaves out bit_xor.
  constexpr std::array<ncclRedOp_t, kReduceKinds> kOps = {ncclSum, ncclAvg, ncclProd, ncclMin, ncclMax,
                                                          ncclSum, ncclMin, ncclMax,  ncclSum};
  op_ = op.kind == Kind::sum && dtype == DType::boolean ? ncclMax : kOps[static_cast<std::size_t>(op.kind)];
  if (op.kind == Kind::avg && op.scalar != target.size) {
    op_ = ncclSum;
    if (op.scalar != 1) create(1 / op.scalar, dtype);
  } else if (op.kind == Kind::premul_sum) {
    create(op.scalar, dtype);
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
