// The ZeRO table: bytes of model state per rank, by strategy and number of ranks, for a number of parameters.
//
// Source: Rajbhandari et al., arXiv 1910.02054, table 1; the bytes are those of src/fsdp/formulas.h.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/fsdp/formulas.h"
#include "tessera/nn/optimizer.h"

namespace tessera::tools {

/// What the table is for.
struct ZeroTableSpec {
  std::int64_t parameters = 0;
  std::vector<int> ranks;               ///< a column for each
  std::vector<std::string> strategies;  ///< empty: all of the engine that can run
  std::string mesh;                     ///< of strategies with two axes; "": the default
  int ranks_per_host = 0;               ///< for the default mesh; 0: one host
  double memory_bytes = 0;              ///< of one rank; 0: unknown
  fsdp::Precision precision;
  nn::OptimizerConfig optimizer;
};

/// One strategy on one number of ranks.
struct ZeroTableRow {
  std::string strategy;
  int ranks = 1;
  fsdp::MeshShape mesh;
  fsdp::ModelStateBytes state;
  std::uint64_t total() const { return state.parameter + state.gradient + state.optimizer; }
};

class ZeroTable {
 public:
  /// Throws InvalidUsage if a strategy that is named can't run on one of the numbers of ranks, or if none can.
  explicit ZeroTable(ZeroTableSpec spec);

  /// By strategy, then by number of ranks.
  const std::vector<ZeroTableRow>& rows() const { return rows_; }
  /// Why strategies of the default list have no row, one line each.
  const std::vector<std::string>& left_out() const { return left_out_; }

  /// The table for a terminal, with its headline and notes.
  std::string text() const;
  nlohmann::ordered_json json() const;
  /// A page with stacked bars.
  std::string page() const;

 private:
  void add(const std::string& strategy, int ranks);
  std::string one_column() const;
  std::string columns() const;
  const ZeroTableRow* find(const std::string& strategy, int ranks) const;

  const ZeroTableSpec spec_;
  std::vector<ZeroTableRow> rows_;
  std::vector<std::string> left_out_;
};

}  // namespace tessera::tools
