#include "tessera/comm/types.h"

#include <array>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

constexpr std::array<std::string_view, 6> kReduceNames = {"sum", "avg", "prod", "min", "max", "premul_sum"};
constexpr std::array<std::string_view, kOpKinds> kOpNames = {"all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                                             "reduce",     "gather",     "scatter",        "all_to_all",
                                                             "send",       "recv",       "barrier"};

template <class Enum, std::size_t N>
Enum parse(const std::array<std::string_view, N>& names, std::string_view name, std::string_view what) {
  std::string known;
  for (std::size_t i = 0; i < N; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
    known += std::string(" ").append(names[i]);
  }
  throw InvalidUsage("unknown " + std::string(what) + " '" + std::string(name) + "'; known:" + known);
}

}  // namespace

std::string_view name_of(ReduceOp::Kind kind) { return kReduceNames[static_cast<std::size_t>(kind)]; }
std::string_view name_of(OpKind kind) { return kOpNames[static_cast<std::size_t>(kind)]; }
ReduceOp::Kind parse_reduce_op(std::string_view name) { return parse<ReduceOp::Kind>(kReduceNames, name, "reduce op"); }
OpKind parse_op_kind(std::string_view name) { return parse<OpKind>(kOpNames, name, "operation"); }

}  // namespace tessera::comm
