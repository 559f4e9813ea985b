// The interface of a loadable module with a backend: one C function, tessera_plugin_entry(). This project's modules and
// third-party modules are loaded alike. The file is named BACKEND.so or BACKEND-VARIANT.so and lies in the directory
// tessera-modules beside the library, or in a directory that TESSERA_PLUGIN_PATH names. It is never unloaded.
//
//   const tessera::comm::Backend& my_backend();   // as a backend of the library defines it
//   TESSERA_PLUGIN(my_backend)
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/abi.h"
#include "tessera/base/env.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/registry.h"

#define TESSERA_PLUGIN_ABI TESSERA_ABI

namespace tessera::comm {

/// The result of create(). Nothing throws through the entry: an exception is returned as an exception_ptr. This is safe
/// because both sides use one C++ library and the same exception types, as the ABI string verifies, and because the
/// code of the module's own exceptions stays loaded.
struct PluginCommunicator {
  std::unique_ptr<Communicator> communicator;  ///< null if `error` is set
  std::exception_ptr error;                    ///< the exception that create() threw; null on success
};

}  // namespace tessera::comm

extern "C" {

/// The library reads `abi` and `size` first; unless they equal its own, it reads nothing else.
struct tessera_plugin {
  const char* abi;                  ///< TESSERA_PLUGIN_ABI
  std::size_t size;                 ///< size of this struct
  std::string_view name;            ///< Backend::name
  std::string_view devices;         ///< Backend::devices
  std::string (*probe)() noexcept;  ///< Backend::probe; an exception becomes its text
  /// The same as Backend::create, without exceptions.
  tessera::comm::PluginCommunicator (*create)(std::shared_ptr<tessera::comm::Bootstrap>,
                                              const tessera::comm::BackendOptions&) noexcept;
  std::span<const tessera::base::EnvVariable> variables;  ///< Backend::variables
  bool deterministic;                                     ///< Backend::deterministic
  std::span<const std::string_view> launch_prefix;        ///< Backend::launch_prefix
};

/// The type of tessera_plugin_entry(). The struct that it returns is never freed.
using tessera_plugin_entry_function = const tessera_plugin*();
}

namespace tessera::comm {

/// Describes `backend`.
template <const Backend& (*backend)()>
tessera_plugin plugin_of(const char* abi) noexcept {
  const Backend& b = backend();
  return {.abi = abi,
          .size = sizeof(tessera_plugin),
          .name = b.name,
          .devices = b.devices,
          .probe = +[]() noexcept -> std::string {
            try {
              return backend().probe();
            } catch (const std::exception& error) {
              return error.what();
            }
          },
          .create =
              +[](std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) noexcept -> PluginCommunicator {
            try {
              return {backend().create(std::move(bootstrap), options), nullptr};
            } catch (...) {
              return {nullptr, std::current_exception()};
            }
          },
          .variables = b.variables,
          .deterministic = b.deterministic,
          .launch_prefix = b.launch_prefix};
}

}  // namespace tessera::comm

/// Use once in a module: exports the backend that the function returns.
#define TESSERA_PLUGIN(backend)                                                                 \
  extern "C" TESSERA_API const tessera_plugin* tessera_plugin_entry() {                         \
    static const tessera_plugin plugin = tessera::comm::plugin_of<backend>(TESSERA_PLUGIN_ABI); \
    return &plugin;                                                                             \
  }
