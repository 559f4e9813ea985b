#include "tools/plan/published_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json/json_reader.h"

namespace tessera::tools {
namespace {

using base::InvalidUsage;
using Objects = std::map<std::string, std::map<std::string, nlohmann::json>>;  // by kind and id

constexpr std::array kWholeNumbers = {"n_gpus", "micro_batch", "accum", "seq"};
constexpr std::array kNumbers = {"global_batch", "tokens_per_s_per_gpu", "step_time_s", "samples_per_s",
                                 "tflops_per_gpu"};
constexpr std::array kTexts = {"framework", "strategy",     "act_ckpt",  "attention", "prefetch", "overlap",
                               "optimizer", "reduce_dtype", "precision", "gpu",       "why",      "loc",
                               "outlier",   "reach",        "role",      "wrap"};

[[noreturn]] void fail(const std::string& file, const std::string& row, const std::string& problem) {
  throw InvalidUsage(fmt::format("{}: row {}: {}", file, row, problem));
}

bool absent(const nlohmann::json& object, const char* key) { return !object.contains(key) || object.at(key).is_null(); }

/// Throws unless the field is absent or a number above 0.
void check_number(const nlohmann::json& object, const char* key, bool whole, const std::string& file,
                  const std::string& row) {
  if (absent(object, key)) return;
  const nlohmann::json& value = object.at(key);
  constexpr double kMax = 1e15;
  if (!value.is_number() || !(value.get<double>() > 0) || value.get<double>() > kMax ||
      (whole && (value.get<double>() > 1e9 || value.get<double>() != static_cast<double>(value.get<std::int64_t>()))))
    fail(file, row,
         fmt::format("{} is {}; expected a {} above 0", key, base::brief(value), whole ? "whole number" : "number"));
}

void check_text(const nlohmann::json& object, const char* key, const std::string& file, const std::string& row) {
  if (!absent(object, key) && !object.at(key).is_string())
    fail(file, row, fmt::format("{} is {}; expected a text", key, base::brief(object.at(key))));
}

void check_fields(const nlohmann::json& fields, const std::string& file, const std::string& row) {
  for (const char* key : kWholeNumbers) check_number(fields, key, true, file, row);
  for (const char* key : kNumbers) check_number(fields, key, false, file, row);
  constexpr int kMostRanks = 1 << 20;
  if (!absent(fields, "n_gpus") && fields.at("n_gpus").get<double>() > kMostRanks)
    fail(file, row,
         fmt::format("n_gpus is {}; at most {} are supported", base::brief(fields.at("n_gpus")), kMostRanks));
  for (const char* key : kTexts) check_text(fields, key, file, row);
  const std::string reach = absent(fields, "reach") ? "" : fields.at("reach").get<std::string>();
  if (!reach.empty() && reach != "yes" && reach != "partial" && reach != "no")
    fail(file, row, fmt::format("reach is \"{}\"; expected yes, partial or no", reach));
}

void check_model(const nlohmann::json& model, const std::string& file, const std::string& row) {
  for (const char* key : {"layers", "hidden", "heads", "vocab"}) {
    if (absent(model, key)) fail(file, row, fmt::format("model.{} is missing; expected a whole number above 0", key));
    check_number(model, key, true, file, row + ": model");
  }
  for (const char* key : {"kv_heads", "ffn"}) check_number(model, key, true, file, row + ": model");
  for (const char* key : {"family", "name"}) check_text(model, key, file, row + ": model");
  if (!absent(model, "tied") && !model.at("tied").is_boolean())
    fail(file, row, fmt::format("model.tied is {}; expected true or false", base::brief(model.at("tied"))));
}

void check_machine(const nlohmann::json& cluster, const std::string& file, const std::string& row) {
  check_text(cluster, "gpu", file, row + ": cluster");
  check_number(cluster, "gpus_per_node", true, file, row + ": cluster");
  check_number(cluster, "inter_Gbps_per_node", false, file, row + ": cluster");
}

/// What a row refers to by id, or holds in place; null if the field is absent.
nlohmann::json referred(const nlohmann::json& fields, const char* key, const Objects& objects, const std::string& file,
                        const std::string& row) {
  if (absent(fields, key)) return {};
  const nlohmann::json& value = fields.at(key);
  if (value.is_object()) return value;
  if (!value.is_string())
    fail(file, row, fmt::format("{} is {}; expected an id or an object", key, base::brief(value)));
  const auto kind = objects.find(key);
  if (kind == objects.end() || !kind->second.contains(value.get<std::string>()))
    fail(file, row, fmt::format("{} is \"{}\", which the file does not have", key, value.get<std::string>()));
  return kind->second.at(value.get<std::string>());
}

/// The id of something that a row refers to; objects in place may have none.
std::string name_of(const nlohmann::json& fields, const char* key, const std::string& otherwise) {
  if (absent(fields, key)) return otherwise;
  const nlohmann::json& value = fields.at(key);
  if (value.is_string()) return value.get<std::string>();
  for (const char* name : {"id", "name"})
    if (value.contains(name) && value.at(name).is_string()) return value.at(name).get<std::string>();
  return otherwise;
}

PublishedRow joined(const nlohmann::json& training, const Objects& objects, const std::string& file) {
  PublishedRow row;
  row.id = training.at("id").get<std::string>();
  if (absent(training, "source")) fail(file, row.id, "source is missing; expected an id or an object");
  const nlohmann::json source = referred(training, "source", objects, file, row.id);
  if (!absent(source, "defaults")) {
    if (!source.at("defaults").is_object()) fail(file, row.id, "source.defaults is no object");
    row.fields = source.at("defaults");
  }
  row.fields.update(training);
  check_fields(row.fields, file, row.id);
  row.reach = row.text("reach");
  row.calibrates = row.text("role") == "calibrate";
  row.source = name_of(training, "source", row.id);
  row.cluster = name_of(row.fields, "cluster", "");
  row.machine = referred(row.fields, "cluster", objects, file, row.id);
  if (row.machine.is_object()) check_machine(row.machine, file, row.id);
  row.model = referred(row.fields, "model", objects, file, row.id);
  if (row.model.is_object())
    check_model(row.model, file, row.id);
  else if (row.reach != "no")
    fail(file, row.id, "model is missing; expected an id or an object");
  return row;
}

std::vector<nlohmann::json> objects_of(const std::string& text, const std::string& file) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) throw InvalidUsage(file + ": is empty; expected a list of rows");
  if (text[first] == '[') {
    const auto list = base::parse_json<nlohmann::json>(text, "'" + file + "'");
    return {list.begin(), list.end()};
  }
  std::vector<nlohmann::json> objects;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number)
    if (line.find_first_not_of(" \t\r") != std::string::npos)
      objects.push_back(base::parse_json<nlohmann::json>(line, fmt::format("'{}: line {}'", file, number)));
  return objects;
}

}  // namespace

std::string PublishedRow::text(const char* key) const {
  return absent(fields, key) ? "" : fields.at(key).get<std::string>();
}

std::optional<double> PublishedRow::number(const char* key) const {
  if (absent(fields, key)) return {};
  return fields.at(key).get<double>();
}

std::vector<PublishedRow> parse_published_rows(const std::string& text, const std::string& file) {
  Objects objects;
  std::vector<nlohmann::json> training;
  const std::vector<nlohmann::json> all = objects_of(text, file);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string number = std::to_string(i + 1);
    if (!all[i].is_object()) fail(file, number, "is " + base::brief(all[i]) + "; expected an object");
    if (absent(all[i], "id")) fail(file, number, "id is missing; expected a text");
    check_text(all[i], "id", file, number);
    check_text(all[i], "kind", file, number);
    const auto id = all[i].at("id").get<std::string>();
    const std::string kind = absent(all[i], "kind") ? "training" : all[i].at("kind").get<std::string>();
    if (!objects[kind].emplace(id, all[i]).second) fail(file, id, "id is given twice");
    if (kind == "training") training.push_back(all[i]);
  }
  std::vector<PublishedRow> rows;
  for (const nlohmann::json& row : training) rows.push_back(joined(row, objects, file));
  if (rows.empty()) throw InvalidUsage(file + ": has no training rows; expected objects with \"kind\": \"training\"");
  return rows;
}

std::vector<PublishedRow> read_published_rows(const std::string& path) {
  const base::FileText file = base::read_regular(path);
  if (!file.problem.empty()) throw InvalidUsage(path + ": " + file.problem);
  return parse_published_rows(file.text, path);
}

}  // namespace tessera::tools
