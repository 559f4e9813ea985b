#include "tools/report/comparison.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tools/cli/statistics.h"
#include "tools/compare/run_result.h"

namespace tessera::tools::report {
namespace {

using nlohmann::json;

/// An object of the file with its location in it, for messages.
class Reader {
 public:
  Reader(const json& value, std::string place) : value_(value), place_(std::move(place)) {
    if (!value_.is_object()) fail("is not an object");
  }

  bool has(const char* name) const { return value_.contains(name); }
  const json& at(const char* name) const {
    const auto found = value_.find(name);
    if (found == value_.end()) fail(std::string("has no '") + name + "'");
    return *found;
  }
  template <class T>
  T number(const char* name) const {
    const json& value = at(name);
    if (!value.is_number()) fail(std::string("'") + name + "' is not a number");
    return value.get<T>();
  }
  std::string text(const char* name) const {
    const json& value = at(name);
    if (!value.is_string()) fail(std::string("'") + name + "' is not a string");
    return value.get<std::string>();
  }
  Reader object(const char* name) const { return {at(name), place_ + " " + name}; }
  const json& list(const char* name) const {
    const json& value = at(name);
    if (!value.is_array()) fail(std::string("'") + name + "' is not an array");
    return value;
  }
  template <std::size_t N>
  std::array<std::int64_t, N> numbers(const char* name, const std::array<const char*, N>& keys) const {
    const Reader inner = object(name);
    std::array<std::int64_t, N> result{};
    for (std::size_t i = 0; i < N; ++i) result[i] = inner.number<std::int64_t>(keys[i]);
    return result;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw base::InvalidUsage(place_ + " " + what + "; give a file that `tessera compare --json` wrote");
  }

 private:
  const json& value_;
  std::string place_;
};

Run parse_run(const Reader& in) {
  Run run;
  run.strategy = in.text("strategy");
  if (in.has("wrap")) run.wrap = in.text("wrap");
  const json& mesh = in.list("mesh");
  if (mesh.size() != 2 || !mesh[0].is_number_integer() || !mesh[1].is_number_integer())
    in.fail("'mesh' is not two numbers");
  run.mesh = {mesh[0].get<int>(), mesh[1].get<int>()};
  for (const json& loss : in.list("losses")) {
    if (!loss.is_number() && !loss.is_null()) in.fail("'losses' holds a value that is not a number");
    run.losses.push_back(number_or_nan(loss));
  }
  run.hash = in.text("final_parameters_hash");
  const Reader times = in.object("step_ms");
  run.step_median_ms = times.number<double>("median");
  run.step_p95_ms = times.number<double>("p95");
  run.tokens_per_second = in.number<double>("tokens_per_second");
  run.exposed_ms = in.number<double>("exposed_communication_ms");
  run.copied_bytes = in.number<std::int64_t>("copied_bytes_per_step");
  run.calls = in.numbers("calls_per_step", kCollectives);
  run.wire_bytes = in.numbers("wire_bytes_per_step", kCollectives);
  run.formula_bytes = in.numbers("formula_bytes_per_step", kCollectives);
  run.model_state = in.numbers("model_state_bytes", kModelState);
  run.peak = in.numbers("peak_bytes", kMemoryKinds);
  run.peak_total = in.object("peak_bytes").number<std::int64_t>("total");
  run.peak_reserved = in.object("peak_bytes").number<std::int64_t>("reserved");
  return run;
}

}  // namespace

Comparison parse_comparison(const json& document, std::string_view source) {
  const Reader in(document, "report: '" + std::string(source) + "'");
  Comparison result;
  result.model = in.text("model");
  result.backend = in.text("backend");
  result.parameters = in.number<std::int64_t>("parameters");
  result.ranks = in.number<int>("ranks");
  result.steps = in.number<int>("steps");
  if (document.contains("machine")) result.machine = in.text("machine");
  const json& runs = in.list("runs");
  for (std::size_t i = 0; i < runs.size(); ++i)
    result.runs.push_back(parse_run({runs[i], "report: '" + std::string(source) + "': run " + std::to_string(i)}));
  if (result.runs.empty()) in.fail("holds no runs");
  return result;
}

std::string name_of(const Run& run) { return run.wrap.empty() ? run.strategy : run.strategy + " " + run.wrap; }

std::string full_name(const Run& run) {
  if (run.mesh[0] == 1 || run.mesh[1] == 1) return name_of(run);
  const std::string mesh = " " + std::to_string(run.mesh[0]) + "x" + std::to_string(run.mesh[1]);
  return run.strategy + mesh + (run.wrap.empty() ? "" : " " + run.wrap);
}

std::vector<std::vector<const Run*>> equal_groups(const Comparison& comparison) {
  std::vector<std::vector<const Run*>> groups;
  for (const Run& run : comparison.runs) {
    const auto equal = [&](const auto& group) {
      return group[0]->hash == run.hash && same_bits(group[0]->losses, run.losses);
    };
    const auto found = std::find_if(groups.begin(), groups.end(), equal);
    if (found != groups.end()) {
      found->push_back(&run);
    } else {
      groups.push_back({&run});
    }
  }
  return groups;
}

}  // namespace tessera::tools::report
