// What the kinds of operations have in common.
#pragma once

#include "tessera/comm/types.h"

namespace tessera::comm {

/// Moves data between two ranks.
constexpr bool is_message(OpKind kind) noexcept { return kind == OpKind::send || kind == OpKind::recv; }

/// Reduces the data of several ranks.
constexpr bool reduces(OpKind kind) noexcept {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}

/// Only the root's `in` is read.
constexpr bool reads_root(OpKind kind) noexcept { return kind == OpKind::broadcast || kind == OpKind::scatter; }

/// Only the root's `out` is written.
constexpr bool writes_root(OpKind kind) noexcept { return kind == OpKind::reduce || kind == OpKind::gather; }

/// Treats one rank unlike the others.
constexpr bool has_root(OpKind kind) noexcept { return reads_root(kind) || writes_root(kind); }

/// `in` consists of a part for each rank.
constexpr bool parts_of_in(OpKind kind) noexcept {
  return kind == OpKind::reduce_scatter || kind == OpKind::scatter || kind == OpKind::all_to_all;
}

/// `out` consists of a part from each rank.
constexpr bool parts_of_out(OpKind kind) noexcept {
  return kind == OpKind::all_gather || kind == OpKind::gather || kind == OpKind::all_to_all;
}

}  // namespace tessera::comm
