// Plug-in files: a shared object that exports collectives, strategies and training tasks by name, through one C
// function, tessera_fsdp_plugin_entry(). FILE.so:NAME is accepted wherever a strategy, a collective or a model is
// named; the file is loaded on first use and never unloaded.
//
//   tessera::fsdp::PluginExports my_offer() {
//     return {.collectives = {{kind, "half", make, cost}}, .strategies = {mine}};
//   }
//   TESSERA_FSDP_PLUGIN(my_offer)
//
//   tessera compare --strategies fsdp,fsdp+./mine.so:half,./mine.so:mine
#pragma once

#include <cstddef>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/abi.h"
#include "tessera/base/export.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/fsdp/training_task.h"

#define TESSERA_FSDP_ABI_NUMBER 11  // counts up whenever a class or struct in the headers of nn or fsdp changes
#define TESSERA_FSDP_PLUGIN_ABI "fsdp " TESSERA_ABI_TEXT(TESSERA_FSDP_ABI_NUMBER) ", " TESSERA_ABI

namespace tessera::fsdp {

/// The arguments of CollectiveRegistry::add(). Ranks may be threads that call `make` and `cost` concurrently.
struct ExportedCollective {
  comm::OpKind collective = comm::OpKind::all_gather;  ///< all_gather, reduce_scatter or all_reduce
  std::string name;                                    ///< NAME of FILE.so:NAME
  CollectiveRegistry::Factory make;                    ///< creates an instance
  CollectiveRegistry::Cost cost = {};                  ///< empty: that of `plain`
};

/// Everything that a file exports. Names consist of letters, digits, '_', '-' and '.', and occur once per kind. A
/// strategy's collectives are built in, or exported by the same file and referred to by their plain names.
struct PluginExports {
  std::vector<ExportedCollective> collectives;  ///< may be empty
  std::vector<Strategy> strategies;             ///< may be empty
  std::vector<ExportedTask> tasks = {};         ///< may be empty
};

/// The result of the entry, which throws nothing itself; see comm::PluginCommunicator.
struct PluginExportsResult {
  PluginExports exports;     ///< empty if `error` is set
  std::exception_ptr error;  ///< the exception that the function threw; null on success
};

}  // namespace tessera::fsdp

extern "C" {

/// The loader reads `abi` and `size` first, and nothing else unless they are the library's own.
struct tessera_fsdp_plugin {
  const char* abi;                                           ///< TESSERA_FSDP_PLUGIN_ABI
  std::size_t size;                                          ///< size of this struct
  tessera::fsdp::PluginExportsResult (*exports)() noexcept;  ///< calls the function that TESSERA_FSDP_PLUGIN names
};

/// The type of tessera_fsdp_plugin_entry(). The struct that it returns is never freed.
using tessera_fsdp_plugin_entry_function = const tessera_fsdp_plugin*();
}

namespace tessera::fsdp {

/// A struct whose entry returns the result of `exports`.
template <PluginExports (*exports)()>
tessera_fsdp_plugin plugin_of(const char* abi) noexcept {
  return {.abi = abi, .size = sizeof(tessera_fsdp_plugin), .exports = +[]() noexcept -> PluginExportsResult {
            try {
              return {exports(), nullptr};
            } catch (...) {
              return {{}, std::current_exception()};
            }
          }};
}

/// Whether `name` refers to a plug-in file: FILE.so:NAME, or FILE.so, which is rejected with a list of the file's
/// exports.
TESSERA_API bool is_plugin_name(std::string_view name);

/// The strategy FILE.so:NAME, with this text as its name. A FILE without a directory is searched in the current
/// directory, then in TESSERA_PLUGIN_PATH. Throws InvalidUsage that says why the file cannot be loaded, which export is
/// invalid, or what the file exports if NAME is not among it.
TESSERA_API Strategy plugin_strategy(std::string_view name);

/// The collective FILE.so:NAME; throws as plugin_strategy() does. An exception of its factory or cost function that is
/// not a Tessera error becomes InvalidUsage with the collective's name.
TESSERA_API ExportedCollective plugin_collective(comm::OpKind collective, std::string_view name);
/// The task FILE.so:NAME, or FILE.so:NAME,KEY=VALUE,... with options, to which `more` are added. Its make() throws
/// InvalidUsage for an option that the task does not read. Throws as plugin_collective() does.
TESSERA_API ExportedTask plugin_task(std::string_view name, const std::map<std::string, std::string>& more = {});
/// Whether the file exports the name for this collective. Throws if the file cannot be loaded.
TESSERA_API bool has_plugin_collective(comm::OpKind collective, std::string_view name);

}  // namespace tessera::fsdp

/// Used once in a shared object: exports what the function `exports` returns.
#define TESSERA_FSDP_PLUGIN(exports)                                                                      \
  extern "C" TESSERA_API const tessera_fsdp_plugin* tessera_fsdp_plugin_entry() {                         \
    static const tessera_fsdp_plugin plugin = tessera::fsdp::plugin_of<exports>(TESSERA_FSDP_PLUGIN_ABI); \
    return &plugin;                                                                                       \
  }
