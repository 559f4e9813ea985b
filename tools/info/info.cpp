// tessera info: shows what this program has.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/cli/words.h"
#include "tools/info/catalog.h"
#include "tools/train/model_files.h"
#include "tools/version.h"

namespace tessera::tools {
namespace {

struct InfoOptions : ModelOptions {
  bool json = false;
  bool env = false;
  bool models = false;
  bool units = false;
  bool words = false;
  std::string wrap = "block";
  int ranks = 4;
};

/// The value of a variable as it may be shown.
std::string shown_value(const comm::ModuleVariable& variable) {
  const auto value = base::read_env({variable.name, variable.default_value, variable.help});
  if (!value) return "";
  return variable.name == "TESSERA_TOKEN" ? "(set)" : *value;  // a secret is not shown
}

int communicators(int replicas, int shards) {
  return fsdp::communicator_count(fsdp::MeshShape::grid(replicas, shards));
}

nlohmann::json to_json(const Catalog& all) {
  using nlohmann::json;
  json backends = json::array();
  json models = json::array();
  json env = json::array();
  for (const BackendEntry& b : all.backends)
    backends.push_back({{"name", b.name}, {"available", b.available}, {"reason", b.reason}, {"devices", b.devices}});
  json devices = json::array();
  for (const base::DeviceInfo& d : all.devices) {
    json found = json::array();
    for (const base::DeviceProperties& p : d.devices)
      found.push_back({{"name", p.name},
                       {"memory_bytes", p.memory_bytes},
                       {"processors", p.processors},
                       {"shares_memory", p.shares_memory}});
    devices.push_back({{"name", d.name},
                       {"available", d.available},
                       {"reason", d.reason},
                       {"devices", found},
                       {"libraries", d.libraries}});
  }
  for (const ModelEntry& m : all.models) models.push_back(m.name);
  for (const comm::ModuleVariable& v : all.variables)
    env.push_back({{"name", v.name}, {"default", v.default_value}, {"value", shown_value(v)}, {"help", v.help}});
  return {{"version", kVersion},
          {"backends", backends},
          {"devices", devices},
          {"strategies", all.strategies},
          {"communicators",
           {{"one_rank", communicators(1, 1)}, {"one_axis", communicators(1, 2)}, {"two_axes", communicators(2, 2)}}},
          {"collectives", all.collectives},
          {"models", models},
          {"env", env}};
}

void print_env(const Catalog& all) {
  std::size_t widest = 8;
  for (const comm::ModuleVariable& v : all.variables) widest = std::max(widest, v.name.size());
  std::printf("%-*s  %-10s %-10s %s\n", static_cast<int>(widest), "variable", "default", "value", "meaning");
  for (const comm::ModuleVariable& v : all.variables)
    std::printf("%-*s  %-10s %-10s %s\n", static_cast<int>(widest), v.name.c_str(), v.default_value.c_str(),
                shown_value(v).c_str(), v.help.c_str());
}

void print_models(const Catalog& all) {
  for (const ModelEntry& m : all.models)
    std::printf("%-12s %14llu parameters  %s\n", m.name.c_str(), static_cast<unsigned long long>(m.parameters),
                m.shape.c_str());
}

void print_names(const char* title, const std::vector<std::string>& names) {
  std::printf("%-12s", title);
  for (const std::string& name : names) std::printf(" %s", name.c_str());
  std::printf("\n");
}

void print_all(const Catalog& all) {
  std::printf("tessera %s\n", kVersion);
  for (const BackendEntry& b : all.backends)
    std::printf("%-12s %-6s %s%s%s\n", "backend", b.name.c_str(), b.available ? "available" : "not available",
                b.reason.empty() ? "" : ": ", b.reason.c_str());
  for (const base::DeviceInfo& d : all.devices) {
    std::string said = d.reason;
    for (const base::DeviceProperties& p : d.devices)
      said += (said.empty() ? "" : ", ") + p.name + (p.shares_memory ? " (IPC)" : "");
    std::printf("%-12s %-6s %s%s%s\n", "device", d.name.c_str(), d.available ? "available" : "not available",
                said.empty() ? "" : ": ", said.c_str());
    if (!d.libraries.empty()) std::printf("%-12s %-6s %s\n", "libraries", d.name.c_str(), d.libraries.c_str());
  }
  print_names("strategies", all.strategies);
  std::printf("%-12s %d per rank, %d over a mesh of two axes\n", "communicators", communicators(1, 2),
              communicators(2, 2));
  print_names("collectives", all.collectives);
  std::vector<std::string> models;
  for (const ModelEntry& m : all.models) models.push_back(m.name);
  print_names("models", models);
  std::printf("More: tessera info --env, --models, --json\n");
}

double mb(std::int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

/// Prints the units of a wrapping: what is unsharded together, and what needlessly.
void print_units(const InfoOptions& options) {
  nn::Context context;
  const auto model = nn::make_model(context, nn::find_config(options.model));
  set_dtypes(*model, base::parse_dtype(options.precision), options.f32_modules);
  std::string better = options.wrap;
  fsdp::NnModel adapted(*model);
  const auto units = fsdp::make_units(adapted.root(), options.wrap);
  std::printf("%-20s %14s %12s %12s\n", "unit", "parameters", "padding", "MB");
  for (const fsdp::UnitSpec& unit : units) {
    std::int64_t elements = 0, padded = 0, bytes = 0;
    for (const fsdp::FlatLayout& layout : fsdp::make_layouts(unit.parameters, options.ranks)) {
      elements += layout.elements;
      padded += layout.padded;
      bytes += static_cast<std::int64_t>(layout.bytes());
    }
    std::printf("%-20s %14lld %12lld %12.2f\n", unit.name.c_str(), static_cast<long long>(elements),
                static_cast<long long>(padded - elements), mb(bytes));
    if (!unit.is_root) continue;
    for (const fsdp::RootOverhead& held : fsdp::needlessly_held(adapted.root(), unit)) {
      std::printf("  %-18s %14lld %12s %12.2f  only this module uses it, but the root holds it for the whole step\n",
                  held.module->path().c_str(), static_cast<long long>(held.elements), "",
                  mb(held.elements * static_cast<std::int64_t>(base::size_of(held.module->dtype()))));
      better += (better == "none" ? "" : ";") + held.module->path();
    }
  }
  if (better != options.wrap && options.wrap != "none" && !options.wrap.starts_with("size:"))
    std::printf("--wrap \"%s\" unshards these when they are used.\n", better.c_str());
}

int run_info(const InfoOptions& options) {
  if (options.words) {
    for (const Word& word : words())
      std::printf("%s\n    %s\n", std::string(word.name).c_str(), std::string(word.meaning).c_str());
    return 0;
  }
  if (options.units) {
    print_units(options);
    return 0;
  }
  const Catalog all = catalog();
  if (options.json) {
    print_json(to_json(all), 2);
  } else if (options.env || options.models) {
    if (options.models) print_models(all);
    if (options.env) print_env(all);
  } else {
    print_all(all);
  }
  return 0;
}

}  // namespace

void add_info(CommandLine& commands) {
  CLI::App* info = commands.app.add_subcommand("info", "show backends, strategies, models and environment variables");
  const auto options = std::make_shared<InfoOptions>();
  info->add_flag("--json", options->json, "print everything as JSON");
  info->add_flag("--env", options->env, "list the environment variables with values and defaults");
  info->add_flag("--words", options->words, "explain the words of the tables and of the report");
  info->add_flag("--models", options->models, "list the model presets");
  CLI::Option* const units =
      info->add_flag("--units", options->units, "list the units that a wrapping makes of a model");
  add_option(*info, "--model", options->model,
             "model for --units: a preset, or a Hugging Face config.json or its folder")
      ->needs(units);
  add_option(*info, "--wrap", options->wrap, "wrapping for --units, as in train")->needs(units);
  add_option(*info, "--ranks", options->ranks, "ranks for --units: padding is to multiples of 8 x ranks",
             whole_number(1, 4096))
      ->needs(units);
  add_option(*info, "--precision", options->precision, "precision for --units, as in train",
             one_of({"f32", "bf16", "f16"}))
      ->needs(units);
  add_option(*info, "--f32-modules", options->f32_modules, "f32 modules for --units, as in train", list_of("LIST"))
      ->needs(units);
  info->callback([&commands, options] { commands.chosen = [options] { return run_info(*options); }; });
}

}  // namespace tessera::tools
