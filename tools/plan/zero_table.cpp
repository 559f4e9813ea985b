#include "tools/plan/zero_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tools/cli/output.h"
#include "tools/pages/page.h"
#include "tools/train/options.h"

namespace tessera::tools {
namespace {

/// GB (1e9 bytes): three digits above 100, one decimal above 1, else two digits.
std::string gigabytes(std::uint64_t bytes) {
  const double value = static_cast<double>(bytes) / 1e9 * (1 + 1e-12);  // halves, which are exact, round up
  if (value >= 99.95) return fmt::format("{:.0f}", value);
  if (value >= 0.995) return fmt::format("{:.1f}", value);
  return value == 0 ? "0" : fmt::format("{:.2g}", value);
}

/// Elements of the flat parameter: the parameters, padded to equal shards. The engine pads each unit, to a multiple of
/// 8 elements per shard.
std::int64_t padded(std::int64_t parameters, const fsdp::Strategy& strategy, const fsdp::MeshShape& mesh) {
  std::int64_t shards = 1;  // of the optimizer's state: other state has as many or fewer
  for (const fsdp::Axis& axis : strategy.optimizer) shards *= mesh.size_of(axis);
  return (parameters + shards - 1) / shards * shards;
}

std::string mesh_text(const fsdp::MeshShape& mesh) {
  return fmt::format("{}x{}", mesh.size_of(fsdp::kReplicateAxis), mesh.size_of(fsdp::kShardAxis));
}

/// Throws InvalidUsage if the mesh is not one of each number of ranks.
void check_mesh(const std::string& text, const std::vector<int>& all_ranks) {
  std::int64_t positions = 1;  // more than an int holds, if the user mistypes
  for (const fsdp::MeshAxis& axis : fsdp::parse_mesh(text).axes) positions *= axis.size;
  for (const int ranks : all_ranks)
    if (positions != ranks)
      throw base::InvalidUsage(fmt::format(
          "--mesh {} has {} positions for {} ranks; replicas x shards must equal --ranks", text, positions, ranks));
}

std::string headline(const ZeroTableSpec& spec) {
  const fsdp::Precision& precision = spec.precision;
  const nn::OptimizerConfig& o = spec.optimizer;
  std::string text = with_commas(spec.parameters) + " parameters in " + std::string(base::name_of(precision.compute)) +
                     (precision.casts() ? ", gradients in " + std::string(base::name_of(precision.reduce)) : "") +
                     ", " + std::string(base::name_of(o.kind)) + (o.amsgrad ? " with amsgrad" : "") +
                     (nn::state_slots(o) == 1 ? " with momentum" : "");
  if (spec.ranks.size() == 1) text += fmt::format(", {} rank{}", spec.ranks[0], spec.ranks[0] == 1 ? "" : "s");
  return text + ": model state per rank in GB (1e9 bytes)";
}

std::string note(const ZeroTableSpec& spec) {
  const int values = nn::state_slots(spec.optimizer) + (spec.precision.has_master_weights() ? 1 : 0);
  std::string text = fmt::format(
      "Bytes per parameter: {} parameter, {} gradient, {} optimizer{}. Not included: unsharded units, activations, "
      "padding.",
      base::size_of(spec.precision.compute), base::size_of(spec.precision.reduce), 4 * values,
      spec.precision.has_master_weights() ? " (with f32 master weights)" : "");
  if (spec.memory_bytes > 0) text += fmt::format(" *: more than the {} GB of a rank.", spec.memory_bytes / 1e9);
  return text;
}

/// "*" if the rank's memory is too small.
std::string mark(const ZeroTableSpec& spec, const ZeroTableRow& row) {
  return spec.memory_bytes > 0 && static_cast<double>(row.total()) > spec.memory_bytes ? "*" : "";
}

}  // namespace

ZeroTable::ZeroTable(ZeroTableSpec spec) : spec_(std::move(spec)) {
  if (!spec_.mesh.empty()) check_mesh(spec_.mesh, spec_.ranks);
  const bool chosen = !spec_.strategies.empty();
  std::string reason;
  for (const std::string& name : chosen ? spec_.strategies : fsdp::strategy_names())
    for (const int ranks : spec_.ranks) {
      try {
        add(name, ranks);
      } catch (const base::InvalidUsage& error) {
        if (chosen) throw;
        reason = error.what();
        left_out_.push_back(reason);
      }
    }
  if (rows_.empty()) throw base::InvalidUsage(reason);
}

void ZeroTable::add(const std::string& name, int ranks) {
  const fsdp::CollectiveRegistry collectives = fsdp::CollectiveRegistry::built_in();
  const fsdp::Strategy strategy = fsdp::parse_strategy(name, collectives);
  if (find(strategy.name, ranks) != nullptr)
    throw base::InvalidUsage("--strategies: " + strategy.name + " is given twice; once is enough");
  const fsdp::MeshShape mesh =
      strategy.two_axes && !spec_.mesh.empty()
          ? fsdp::parse_mesh(spec_.mesh)
          : fsdp::default_mesh(strategy, ranks, spec_.ranks_per_host > 0 ? spec_.ranks_per_host : ranks);
  fsdp::validate(strategy, mesh);
  fsdp::validate_collectives(strategy, mesh, spec_.precision, collectives);
  refuse_scaled_replicas(strategy, spec_.precision);
  const fsdp::ModelStateBytes state = fsdp::model_state_formula(
      strategy, mesh, padded(spec_.parameters, strategy, mesh), nn::state_slots(spec_.optimizer), spec_.precision);
  rows_.push_back({strategy.name, ranks, mesh, state});
}

const ZeroTableRow* ZeroTable::find(const std::string& strategy, int ranks) const {
  const auto found = std::ranges::find_if(
      rows_, [&](const ZeroTableRow& row) { return row.strategy == strategy && row.ranks == ranks; });
  return found == rows_.end() ? nullptr : &*found;
}

std::string ZeroTable::one_column() const {
  std::string text = fmt::format("{:<14} {:>9} {:>11} {:>11} {:>11} {:>9}\n", "strategy", "mesh", "parameters",
                                 "gradients", "optimizer", "total");
  for (const ZeroTableRow& row : rows_)
    text += fmt::format("{:<14} {:>9} {:>11} {:>11} {:>11} {:>9}{}\n", row.strategy, mesh_text(row.mesh),
                        gigabytes(row.state.parameter), gigabytes(row.state.gradient), gigabytes(row.state.optimizer),
                        gigabytes(row.total()), mark(spec_, row));
  return text;
}

std::string ZeroTable::columns() const {
  std::string text = fmt::format("{:<14}", "strategy");
  for (const int ranks : spec_.ranks) text += fmt::format(" {:>9}", ranks);
  std::string name;
  for (const ZeroTableRow& first : rows_) {
    if (first.strategy == name) continue;
    name = first.strategy;
    text += fmt::format("\n{:<14}", name);
    for (const int ranks : spec_.ranks) {
      const ZeroTableRow* row = find(name, ranks);
      text += fmt::format(" {:>9}", row == nullptr ? "-" : gigabytes(row->total()) + mark(spec_, *row));
    }
  }
  return text + "\n";
}

std::string ZeroTable::text() const {
  std::string text;
  for (const std::string& line : left_out_) text += "left out: " + line + "\n";
  return text + headline(spec_) + "\n" + (spec_.ranks.size() == 1 ? one_column() : columns()) + note(spec_) + "\n";
}

nlohmann::ordered_json ZeroTable::json() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const ZeroTableRow& row : rows_)
    rows.push_back(
        {{"strategy", row.strategy},
         {"ranks", row.ranks},
         {"mesh", {row.mesh.size_of(fsdp::kReplicateAxis), row.mesh.size_of(fsdp::kShardAxis)}},
         {"model_state_bytes", row.total()},
         {"parts",
          {{"parameter", row.state.parameter}, {"gradient", row.state.gradient}, {"optimizer", row.state.optimizer}}}});
  using Json = nlohmann::ordered_json;
  return {{"ranks", spec_.ranks.size() == 1 ? Json(spec_.ranks[0]) : Json(spec_.ranks)},
          {"parameters", spec_.parameters},
          {"rows", rows}};
}

std::string ZeroTable::page() const {
  std::string body = "<h1>Model state per rank</h1>\n<p class=\"soft\">" + pages::escape(headline(spec_)) + "</p>\n";
  for (const int ranks : spec_.ranks) {
    const std::string title = fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s");
    nlohmann::ordered_json bars = nlohmann::ordered_json::array();
    pages::Table table{"Bytes of model state per rank, " + title,
                       {"strategy", "mesh", "parameters", "gradients", "optimizer", "total"},
                       {}};
    for (const ZeroTableRow& row : rows_) {
      if (row.ranks != ranks) continue;
      const auto& [parameter, gradient, optimizer, transient] = row.state;
      bars.push_back({row.strategy, {parameter, gradient, optimizer}, spec_.memory_bytes, row.total()});
      std::vector<std::string>& cells = table.rows.emplace_back(1, row.strategy);
      cells.push_back(mesh_text(row.mesh));
      for (const std::uint64_t bytes : {parameter, gradient, optimizer, row.total()})
        cells.push_back(with_commas(bytes));
    }
    body +=
        "<h2>" + title + "</h2>\n" +
        pages::chart("bars", {{"label", "Bytes of model state per rank by strategy; the table below has the numbers"},
                              {"unit", "bytes"},
                              {"keys", {"parameters", "gradients", "optimizer"}},
                              {"mark", spec_.memory_bytes > 0 ? "memory of a rank" : ""},
                              {"rows", bars}}) +
        pages::to_html(table);
  }
  return pages::document("ZeRO table", body + "<p>" + pages::escape(note(spec_)) + "</p>\n");
}

}  // namespace tessera::tools
