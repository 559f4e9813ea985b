// tessera info: shows what this program has.

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "tessera/base/device_runtime.h"
#include "tessera/comm/registry.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/fsdp/nn_task.h"
#include "tessera/fsdp/plugin.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/launch/ranks.h"
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

/// All variables by name, with those of modules.
std::vector<comm::ModuleVariable> variables_of(const std::vector<comm::BackendState>& backends) {
  std::vector<comm::ModuleVariable> all;
  for (const base::EnvVariable& own : all_variables())
    all.push_back({std::string(own.name), std::string(own.default_value), std::string(own.help)});
  for (const comm::BackendState& state : backends)
    all.insert(all.end(), state.variables.begin(), state.variables.end());
  std::ranges::sort(all, {}, &comm::ModuleVariable::name);
  return all;
}

/// The value of a variable as it may be shown.
std::string shown_value(const comm::ModuleVariable& variable) {
  const auto value = base::read_env({variable.name, variable.default_value, variable.help});
  if (!value) return "";
  return variable.name == "TESSERA_TOKEN" ? "(set)" : *value;  // a secret is not shown
}

int communicators(int replicas, int shards) {
  return fsdp::communicator_count(fsdp::MeshShape::grid(replicas, shards));
}

nlohmann::json everything() {
  using nlohmann::json;
  const std::vector<comm::BackendState> states = comm::list_backends();
  json backends = json::array(), devices = json::array(), env = json::array();
  for (const comm::BackendState& b : states)
    backends.push_back({{"name", b.name},
                        {"available", b.available},
                        {"reason", b.reason},
                        {"devices", b.devices.empty() ? json::array() : json::array({b.devices})}});
  for (const base::DeviceInfo& d : base::list_devices()) {
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
  for (const comm::ModuleVariable& v : variables_of(states))
    env.push_back({{"name", v.name}, {"default", v.default_value}, {"value", shown_value(v)}, {"help", v.help}});
  return {{"version", kVersion},
          {"backends", backends},
          {"devices", devices},
          {"strategies", fsdp::strategy_names()},
          {"communicators",
           {{"one_rank", communicators(1, 1)}, {"one_axis", communicators(1, 2)}, {"two_axes", communicators(2, 2)}}},
          {"collectives", fsdp::CollectiveRegistry::built_in().names()},
          {"models", nn::preset_names()},
          {"env", env}};
}

void print_env() {
  const std::vector<comm::ModuleVariable> all = variables_of(comm::list_backends());
  std::size_t widest = 8;
  for (const comm::ModuleVariable& v : all) widest = std::max(widest, v.name.size());
  print_clean("{:<{}}  {:<10} {:<10} {}\n", "variable", widest, "default", "value", "meaning");
  for (const comm::ModuleVariable& v : all)
    print_clean("{:<{}}  {:<10} {:<10} {}\n", v.name, widest, v.default_value, shown_value(v), v.help);
}

void print_models() {
  for (const std::string& name : nn::preset_names()) {
    const nn::ModelConfig m = nn::preset(name);
    print_clean("{:<12} {:>14} parameters  {} layers, width {}, {} heads, vocabulary {}, context {}\n", name,
                nn::parameter_count(m), m.layers, m.width, m.heads, m.vocabulary, m.context);
  }
}

/// A line of what a backend or device is, and why it can't be used or what it has.
void print_state(const char* kind, const std::string& name, bool available, const std::string& said) {
  print_clean("{:<12} {:<6} {}{}{}\n", kind, name, available ? "available" : "not available", said.empty() ? "" : ": ",
              said);
}

void print_all() {
  print_clean("tessera {}\n", kVersion);
  for (const comm::BackendState& b : comm::list_backends()) print_state("backend", b.name, b.available, b.reason);
  for (const base::DeviceInfo& d : base::list_devices()) {
    std::string said = d.reason;
    for (const base::DeviceProperties& p : d.devices)
      said += (said.empty() ? "" : ", ") + p.name + (p.shares_memory ? " (IPC)" : "");
    print_state("device", d.name, d.available, said);
    if (!d.libraries.empty()) print_clean("{:<12} {:<6} {}\n", "libraries", d.name, d.libraries);
  }
  print_clean("strategies   {}\n", joined_by(fsdp::strategy_names(), " "));
  print_clean("communicators {} per rank, {} over a mesh of two axes\n", communicators(1, 2), communicators(2, 2));
  print_clean("collectives  {}\n", joined_by(fsdp::CollectiveRegistry::built_in().names(), " "));
  print_clean("models       {}\n", joined_by(nn::preset_names(), " "));
  print_clean("More: tessera info --env, --models, --json\n");
}

double mb(std::int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

/// The units of a wrapping: what is unsharded together, and what needlessly.
nlohmann::json units_of(const InfoOptions& options) {
  const base::DType dtype = base::parse_dtype(options.precision == "fp8" ? "bf16" : options.precision);  // as in train
  nn::Context context;
  const auto runtime = fsdp::make_runtime(context);
  std::unique_ptr<nn::Module> own;
  std::unique_ptr<fsdp::TrainingTask> task;
  std::unique_ptr<fsdp::Model> adapted;
  if (fsdp::is_plugin_name(options.model)) {
    task = fsdp::plugin_task(options.model, {}).make({.runtime = *runtime, .dtype = dtype});
    if (auto* const made = dynamic_cast<fsdp::NnTask*>(task.get()))
      set_dtypes(made->module(), dtype, options.f32_modules);
    else if (!options.f32_modules.empty())
      throw base::InvalidUsage("--f32-modules with --model " + options.model + ": it needs a model of tessera::nn");
  } else {
    own = nn::make_model(context, nn::find_config(options.model));
    set_dtypes(*own, dtype, options.f32_modules);
    adapted = std::make_unique<fsdp::NnModel>(*own);
  }
  fsdp::Module& root = (task ? task->model() : *adapted).root();
  std::string better = options.wrap;
  nlohmann::json units = nlohmann::json::array();
  for (const fsdp::UnitSpec& unit : fsdp::make_units(root, options.wrap)) {
    std::int64_t elements = 0, padded = 0, bytes = 0;
    for (const fsdp::FlatLayout& layout : fsdp::make_layouts(unit.parameters, options.ranks)) {
      elements += layout.elements;
      padded += layout.padded;
      bytes += static_cast<std::int64_t>(layout.bytes());
    }
    nlohmann::json held = nlohmann::json::array();
    for (const fsdp::RootOverhead& one :
         unit.is_root ? fsdp::needlessly_held(root, unit) : decltype(fsdp::needlessly_held(root, unit)){}) {
      held.push_back({{"module", one.module->path()},
                      {"parameters", one.elements},
                      {"bytes", one.elements * static_cast<std::int64_t>(base::size_of(one.module->dtype()))}});
      better += (better == "none" ? "" : ";") + one.module->path();
    }
    units.push_back({{"unit", unit.name},
                     {"parameters", elements},
                     {"padding", padded - elements},
                     {"bytes", bytes},
                     {"needlessly_held", held}});
  }
  const bool improves = better != options.wrap && options.wrap != "none" && !options.wrap.starts_with("size:");
  return {{"wrap", options.wrap},
          {"ranks", options.ranks},
          {"units", units},
          {"better_wrap", improves ? nlohmann::json(better) : nlohmann::json()}};
}

void print_units(const nlohmann::json& found) {
  print_clean("{:<20} {:>14} {:>12} {:>12}\n", "unit", "parameters", "padding", "MB");
  for (const nlohmann::json& unit : found["units"]) {
    print_clean("{:<20} {:>14} {:>12} {:>12.2f}\n", unit["unit"].get<std::string>(),
                unit["parameters"].get<std::int64_t>(), unit["padding"].get<std::int64_t>(), mb(unit["bytes"]));
    for (const nlohmann::json& held : unit["needlessly_held"])
      print_clean("  {:<18} {:>14} {:>25.2f}  only this module uses it, but the root holds it for the whole step\n",
                  held["module"].get<std::string>(), held["parameters"].get<std::int64_t>(), mb(held["bytes"]));
  }
  if (const nlohmann::json& better = found["better_wrap"]; better.is_string())
    print_clean("--wrap \"{}\" unshards these when they are used.\n", better.get<std::string>());
}

int run_info(const InfoOptions& options) {
  if (options.words) {
    for (const Word& word : words()) print_clean("{}\n    {}\n", word.name, word.meaning);
  } else if (options.units) {
    const nlohmann::json units = units_of(options);
    options.json ? print_json(units, 2) : print_units(units);
  } else if (options.json) {
    print_json(everything(), 2);
  } else if (options.env || options.models) {
    if (options.models) print_models();
    if (options.env) print_env();
  } else {
    print_all();
  }
  return 0;
}

}  // namespace

void add_info(CommandLine& commands) {
  CLI::App* info = commands.app.add_subcommand("info", "show backends, strategies, models and environment variables");
  const auto options = std::make_shared<InfoOptions>();
  CLI::Option* const json = info->add_flag("--json", options->json, "print everything, or the units, as JSON");
  CLI::Option* const env =
      info->add_flag("--env", options->env, "list the environment variables with values and defaults");
  CLI::Option* const words =
      info->add_flag("--words", options->words, "explain the words of the tables and of the report");
  CLI::Option* const models = info->add_flag("--models", options->models, "list the model presets");
  CLI::Option* const units =
      info->add_flag("--units", options->units, "list the units that a wrapping makes of a model");
  for (CLI::Option* const other : {json, env, models, units}) words->excludes(other);
  for (CLI::Option* const other : {env, models}) units->excludes(other);
  add_option(*info, "--model", options->model,
             "model for --units: a preset, a Hugging Face config.json or its folder, or FILE.so:NAME,OPTION=VALUE")
      ->needs(units);
  add_option(*info, "--wrap", options->wrap, "wrapping for --units, as in train")->needs(units);
  add_option(*info, "--ranks", options->ranks, "ranks for --units: padding is to multiples of 8 x ranks",
             whole_number(1, 4096))
      ->needs(units);
  add_option(*info, "--precision", options->precision, "precision for --units, as in train",
             one_of({"f32", "bf16", "f16", "fp8"}))
      ->needs(units);
  add_option(*info, "--f32-modules", options->f32_modules, "f32 modules for --units, as in train", list_of("LIST"))
      ->needs(units);
  info->callback([&commands, options] { commands.chosen = [options] { return run_info(*options); }; });
}

}  // namespace tessera::tools
