// A small module that the build compiles in several variants: each has one defect or none.
#include <stdexcept>

#include "tessera/comm/plugin.h"

#ifndef WHY_NOT
#define WHY_NOT ""
#endif

namespace {

using namespace tessera::comm;

/// A type that exists in this module only.
struct OwnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[maybe_unused]] const Backend& backend() {
  static const EnvVariable kVariables[] = {{"TESSERA_PAPER", "a4", "the size of the sheets"}};
  static const std::string_view kLaunch[] = {"paperrun", "-n", "{ranks}"};
  static const Backend kBackend{
      .name = MODULE_NAME,
      .devices = "cpu",
      .probe = [] { return std::string(WHY_NOT); },
      .create = [](const std::shared_ptr<Bootstrap>&, const BackendOptions& options) -> std::unique_ptr<Communicator> {
        if (options.algorithms == "own") throw OwnError("an error of the module's own type");
        throw tessera::base::Unsupported("paper carries nothing");
      },
      .variables = kVariables,
      .launch_prefix = kLaunch};
  return kBackend;
}

}  // namespace

#if defined(CRASHES)
TESSERA_PLUGIN(backend)
[[gnu::constructor]] static void crash() { __builtin_trap(); }
#elif defined(OTHER_ABI)
extern "C" TESSERA_API const tessera_plugin* tessera_plugin_entry() {
  static const tessera_plugin plugin = tessera::comm::plugin_of<backend>(OTHER_ABI);
  return &plugin;
}
#elif defined(OTHER_SIZE)
extern "C" TESSERA_API const tessera_plugin* tessera_plugin_entry() {
  static tessera_plugin plugin = tessera::comm::plugin_of<backend>(TESSERA_PLUGIN_ABI);
  plugin.size += 8;
  return &plugin;
}
#elif defined(NEEDS_GONE)
extern "C" int tessera_test_gone();
TESSERA_PLUGIN(backend)
extern "C" TESSERA_API int use_gone() { return tessera_test_gone(); }
#elif !defined(NO_ENTRY)
TESSERA_PLUGIN(backend)
#endif
