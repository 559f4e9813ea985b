#include "tessera/comm/types.h"

#include <array>

#include "tessera/base/parse.h"

namespace tessera::comm {
namespace {

constexpr std::array<std::string_view, kReduceKinds> kReduceNames = {"sum",        "avg",     "prod",   "min",    "max",
                                                                     "premul_sum", "bit_and", "bit_or", "bit_xor"};
constexpr std::array<std::string_view, kOpKinds> kOpNames = {"all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                                             "reduce",     "gather",     "scatter",        "all_to_all",
                                                             "send",       "recv",       "barrier"};

}  // namespace

std::string_view name_of(ReduceOp::Kind kind) { return kReduceNames[static_cast<std::size_t>(kind)]; }
std::string_view name_of(OpKind kind) { return kOpNames[static_cast<std::size_t>(kind)]; }
ReduceOp::Kind parse_reduce_op(std::string_view name) {
  return static_cast<ReduceOp::Kind>(parse_name(name, "reduce op", kReduceNames));
}
OpKind parse_op_kind(std::string_view name) { return static_cast<OpKind>(parse_name(name, "operation", kOpNames)); }

}  // namespace tessera::comm
