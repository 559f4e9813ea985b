// Plug-in files with strategies, collectives and tasks: search, loading, validation and lookup.
#include "tessera/fsdp/plugin.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>

#include "tessera/base/device/module_loader.h"
#include "tessera/comm/plugins/module_loader.h"

namespace tessera::fsdp {

using comm::OpKind;

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".so";
constexpr std::array kPluggable = {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce};

/// FILE.so:NAME,OPTIONS, split.
struct PluginName {
  std::string file, name, options;
};

PluginName split(std::string_view text) {
  const std::size_t colon = text.find(".so:");
  if (colon == std::string_view::npos) return {std::string(text), "", ""};
  const std::size_t end = colon + kSuffix.size();
  const std::string_view rest = text.substr(end + 1);
  const std::size_t comma = rest.find(',');
  return {std::string(text.substr(0, end)), std::string(rest.substr(0, comma)),
          comma == std::string_view::npos ? "" : std::string(rest.substr(comma + 1))};
}

/// KEY=VALUE,... Throws InvalidUsage that begins with `title`.
std::map<std::string, std::string> options_of(const PluginName& name, std::map<std::string, std::string> options) {
  for (std::string_view rest = name.options; !rest.empty();) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    if (equals == 0 || equals == std::string_view::npos)
      throw InvalidUsage(name.file + ":" + name.name + ": '" + std::string(item) + "' is no option; write KEY=VALUE");
    const auto [place, is_new] =
        options.emplace(std::string(item.substr(0, equals)), std::string(item.substr(equals + 1)));
    if (!is_new) throw InvalidUsage(name.file + ":" + name.name + ": option " + place->first + " is given twice");
  }
  return options;
}

fs::path find_file(const std::string& file) {
  std::error_code error;
  fs::path found = fs::canonical(file, error);
  if (!error) return found;
  const bool bare = file.find('/') == std::string::npos;
  if (bare)
    for (const comm::ModuleFile& module : comm::find_modules())
      if (fs::path(module.path).filename() == file && module.problem.empty()) return fs::canonical(module.path);
  throw InvalidUsage(
      file + ": no such file" +
      (bare ? " in the current directory or in TESSERA_PLUGIN_PATH; name its directory too, as ./" + file : ""));
}

std::string listed(const PluginExports& exports) {
  std::string text;
  const auto add = [&](std::string_view kind, const std::string& name) {
    text += (text.empty() ? "" : ", ") + std::string(kind) + " " + name;
  };
  for (const Strategy& strategy : exports.strategies) add("strategy", strategy.name);
  for (const ExportedCollective& each : exports.collectives) add(comm::name_of(each.collective), each.name);
  for (const ExportedTask& each : exports.tasks) add("model", each.name);
  return text.empty() ? "nothing" : text;
}

void require_name(const std::string& name, const std::string& what) {
  const bool fits = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           c == '.';
  });
  if (!fits || name.empty())
    throw InvalidUsage(what + " is called '" + name + "'; names consist of letters, digits, '_', '-' and '.'");
}

/// Throws InvalidUsage if an export is invalid.
void look_over(const PluginExports& exports) {
  std::set<std::pair<std::string, std::string>> names;
  const auto add = [&](const std::string& kind, const std::string& name) {
    require_name(name, "its " + kind);
    if (!names.emplace(kind, name).second) throw InvalidUsage("it provides " + kind + " " + name + " twice");
  };
  for (const ExportedCollective& each : exports.collectives) {
    const std::string kind(comm::name_of(each.collective));
    add(kind, each.name);
    if (std::find(kPluggable.begin(), kPluggable.end(), each.collective) == kPluggable.end())
      throw InvalidUsage("its " + kind + " " + each.name +
                         " would never be called; an engine calls all_gather, reduce_scatter and all_reduce");
    if (!each.make) throw InvalidUsage("its " + kind + " " + each.name + " has no make function");
  }
  for (const ExportedTask& each : exports.tasks) {
    add("model", each.name);
    if (!each.make) throw InvalidUsage("its model " + each.name + " has no make function");
  }
  const CollectiveRegistry built_in = CollectiveRegistry::built_in();
  for (const Strategy& strategy : exports.strategies) {
    add("strategy", strategy.name);
    validate(strategy);
    for (const auto& [collective, name] : {std::pair(OpKind::all_gather, &strategy.all_gather),
                                           std::pair(OpKind::reduce_scatter, &strategy.reduce_scatter),
                                           std::pair(OpKind::all_reduce, &strategy.all_reduce)}) {
      const std::string kind(comm::name_of(collective));
      if (!names.contains({kind, *name}) && (is_plugin_name(*name) || !built_in.has(collective, *name)))
        throw InvalidUsage("strategy " + strategy.name + ": its " + kind + " '" + *name +
                           "' is neither built in nor provided by the file itself");
    }
  }
}

/// Calls a plug-in's function and adds its name to foreign exceptions.
template <class Function, class... Arguments>
auto call_named(const std::string& name, const Function& function, const Arguments&... arguments) {
  try {
    return function(arguments...);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw InvalidUsage(name + ": " + error.what());
  } catch (...) {
    throw InvalidUsage(name + ": it threw an exception that is not a std::exception");
  }
}

const PluginExports& load(const std::string& file) {
  // Loaded modules are process-wide, as for dlopen() itself.
  static std::mutex mutex;
  static std::map<std::string, PluginExports> loaded;
  const std::string path = find_file(file).string();
  const std::lock_guard lock(mutex);
  const auto known = loaded.find(path);
  if (known != loaded.end()) return known->second;
  const auto* const plugin = base::open_module<tessera_fsdp_plugin>(
      path, {"tessera_fsdp_plugin", "plug-in with strategies, collectives or models", TESSERA_FSDP_PLUGIN_ABI,
             sizeof(tessera_fsdp_plugin)});
  PluginExportsResult got = plugin->exports();
  call_named(file, [&] {
    if (got.error != nullptr) std::rethrow_exception(got.error);
  });
  try {
    look_over(got.exports);
  } catch (const InvalidUsage& error) {
    throw InvalidUsage(file + ": " + error.what());
  } catch (const Unsupported& error) {
    throw Unsupported(file + ": " + error.what());
  }
  return loaded.emplace(path, std::move(got.exports)).first->second;
}

[[noreturn]] void refuse(const PluginName& wanted, std::string_view kind, const PluginExports& exports) {
  if (wanted.name.empty())
    throw InvalidUsage(wanted.file + ": write " + wanted.file + ":NAME; it provides " + listed(exports));
  throw InvalidUsage(wanted.file + " provides no " + std::string(kind) + " '" + wanted.name + "'; it provides " +
                     listed(exports));
}

const ExportedCollective* find(const PluginExports& exports, OpKind collective, const std::string& name) {
  const auto found =
      std::find_if(exports.collectives.begin(), exports.collectives.end(),
                   [&](const ExportedCollective& each) { return each.collective == collective && each.name == name; });
  return found == exports.collectives.end() ? nullptr : &*found;
}

}  // namespace

bool is_plugin_name(std::string_view name) {
  return name.find(".so:") != std::string_view::npos || name.ends_with(kSuffix);
}

Strategy plugin_strategy(std::string_view name) {
  const PluginName wanted = split(name);
  const PluginExports& exports = load(wanted.file);
  for (const Strategy& each : exports.strategies) {
    if (each.name != wanted.name) continue;
    Strategy strategy = each;
    strategy.name = name;
    for (const auto& [collective, plugin_name] : {std::pair(OpKind::all_gather, &strategy.all_gather),
                                                  std::pair(OpKind::reduce_scatter, &strategy.reduce_scatter),
                                                  std::pair(OpKind::all_reduce, &strategy.all_reduce)})
      if (find(exports, collective, *plugin_name) != nullptr) *plugin_name = wanted.file + ":" + *plugin_name;
    return strategy;
  }
  refuse(wanted, "strategy", exports);
}

ExportedCollective plugin_collective(OpKind collective, std::string_view name) {
  const PluginName wanted = split(name);
  const PluginExports& exports = load(wanted.file);
  const ExportedCollective* const found = find(exports, collective, wanted.name);
  if (found == nullptr) refuse(wanted, comm::name_of(collective), exports);
  ExportedCollective named = *found;
  named.make = [title = std::string(name), make = found->make] {
    auto made = call_named(title, make);
    if (made == nullptr) throw InvalidUsage(title + ": its make function returned null");
    return made;
  };
  if (found->cost)
    named.cost = [title = std::string(name), cost = found->cost](const CollectiveSize& size) {
      return call_named(title, cost, size);
    };
  return named;
}

bool has_plugin_collective(OpKind collective, std::string_view name) {
  const PluginName wanted = split(name);
  return find(load(wanted.file), collective, wanted.name) != nullptr;
}

ExportedTask plugin_task(std::string_view name, const std::map<std::string, std::string>& more) {
  const PluginName wanted = split(name);
  const PluginExports& exports = load(wanted.file);
  const auto found =
      std::ranges::find_if(exports.tasks, [&](const ExportedTask& each) { return each.name == wanted.name; });
  if (found == exports.tasks.end()) refuse(wanted, "model", exports);
  const std::string title = wanted.file + ":" + wanted.name;
  const auto make = [title, make = found->make, values = options_of(wanted, more)](const TaskSetup& setup) {
    TaskSetup with = setup;
    with.options = TaskOptions(values);
    auto task = call_named(title, [&] {
      try {
        return make(with);
      } catch (const InvalidUsage& error) {
        throw InvalidUsage(title + ": " + error.what());
      }
    });
    if (task == nullptr) throw InvalidUsage(title + ": its make function returned null");
    with.options.refuse_unknown(title);
    return task;
  };
  return {found->name, make};
}

}  // namespace tessera::fsdp
