#include "backends/mpi/reduce_ops.h"

#include <utility>

#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::mpi {
namespace {

using Kind = ReduceOp::Kind;

template <std::size_t Type, std::size_t Which>
void combine(void* in, void* both, int* count, MPI_Datatype* /*type*/) {
  const std::array<const void*, 2> sources = {in, both};
  reduce_tree({static_cast<Kind>(Which), 0}, kDTypes[Type], sources, {}, both, static_cast<std::size_t>(*count));
}

using Row = std::array<MPI_User_function*, kReduceKinds>;

template <std::size_t Type, std::size_t... Which>
constexpr Row row_of(std::index_sequence<Which...> /*kinds*/) {
  return {combine<Type, Which>...};
}

template <std::size_t... Type>
constexpr std::array<Row, sizeof...(Type)> table(std::index_sequence<Type...> /*types*/) {
  return {row_of<Type>(std::make_index_sequence<kReduceKinds>{})...};
}

constexpr auto kFunctions = table(std::make_index_sequence<kDTypes.size()>{});

}  // namespace

MPI_Datatype mpi_type(DType dtype) noexcept {
  const std::array<MPI_Datatype, kDTypes.size()> types = {MPI_FLOAT,    MPI_DOUBLE,   MPI_UINT16_T, MPI_UINT16_T,
                                                          MPI_INT8_T,   MPI_UINT8_T,  MPI_INT32_T,  MPI_INT64_T,
                                                          MPI_UINT32_T, MPI_UINT64_T, MPI_INT16_T,  MPI_UINT8_T};
  return types[static_cast<std::size_t>(dtype)];
}

MPI_Op MpiReduceOps::of(Kind kind, DType dtype) noexcept {
  const bool is_native = dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i32 || dtype == DType::i64;
  if (kind == Kind::sum && is_native) return MPI_SUM;
  const auto type = static_cast<std::size_t>(dtype);
  const auto which = static_cast<std::size_t>(kind);
  MPI_Op& own = own_[type][which];
  constexpr int kCommutes = 1;
  if (own == MPI_OP_NULL) MPI_Op_create(kFunctions[type][which], kCommutes, &own);
  return own;
}

void MpiReduceOps::free() noexcept {
  for (auto& row : own_)
    for (MPI_Op& op : row)
      if (op != MPI_OP_NULL) MPI_Op_free(&op);
}

}  // namespace tessera::comm::mpi
