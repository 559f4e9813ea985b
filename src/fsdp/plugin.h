// What a shared object offers to trainings: collectives and strategies by name, through one C function,
// tessera_fsdp_plugin_entry(). It is named as FILE.so:NAME wherever a strategy or a collective is, loaded then, and
// never unloaded.
//
//   tessera::fsdp::Offer my_offer() { return {.collectives = {{kind, "half", make, cost}}, .strategies = {mine}}; }
//   TESSERA_FSDP_PLUGIN(my_offer)
//
//   tessera compare --strategies fsdp,fsdp+./mine.so:half,./mine.so:mine
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/abi.h"
#include "tessera/base/export.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/strategy.h"

#define TESSERA_FSDP_ABI_NUMBER 2  // counts up whenever a class or struct in the headers of nn or fsdp changes
#define TESSERA_FSDP_PLUGIN_ABI "fsdp " TESSERA_ABI_TEXT(TESSERA_FSDP_ABI_NUMBER) ", " TESSERA_ABI

namespace tessera::fsdp {

/// What CollectiveRegistry::add() takes. Ranks may be threads, which call both at the same time.
struct OfferedCollective {
  comm::OpKind collective = comm::OpKind::all_gather;  ///< or reduce_scatter, or all_reduce
  std::string name;
  CollectiveRegistry::Factory make;
  CollectiveRegistry::Cost cost = {};  ///< empty: that of `plain`
};

/// Names have letters, digits, '_', '-' and '.', and occur once. What carries a strategy's collectives is built in, or
/// one of the same offer, by its name alone.
struct PluginExports {
  std::vector<OfferedCollective> collectives;
  std::vector<Strategy> strategies;
};

/// Nothing throws through the entry; see comm::PluginCommunicator.
struct PluginOffer {
  PluginExports offer;
  std::exception_ptr error;
};

}  // namespace tessera::fsdp

extern "C" {

/// `abi` and `size` are read first, and nothing else where they are not the library's own.
struct tessera_fsdp_plugin {
  const char* abi;   ///< TESSERA_FSDP_PLUGIN_ABI
  std::size_t size;  ///< of this struct
  tessera::fsdp::PluginOffer (*offer)() noexcept;
};

using tessera_fsdp_plugin_entry_function = const tessera_fsdp_plugin*();
}

namespace tessera::fsdp {

/// The struct that hands out what `offer` returns.
template <PluginExports (*offer)()>
tessera_fsdp_plugin plugin_of(const char* abi) noexcept {
  return {.abi = abi, .size = sizeof(tessera_fsdp_plugin), .offer = +[]() noexcept -> PluginOffer {
            try {
              return {offer(), nullptr};
            } catch (...) {
              return {{}, std::current_exception()};
            }
          }};
}

/// Whether `name` is one of a shared object: FILE.so:NAME, or FILE.so, which is refused with what the file offers.
TESSERA_API bool is_plugin_name(std::string_view name);

/// The strategy FILE.so:NAME, which has this as its name. A FILE without a folder is looked for in the current one,
/// then where TESSERA_PLUGIN_PATH points. Throws InvalidUsage: why the file can't be loaded, what of its offer can't
/// be, or what it offers where NAME isn't among that.
TESSERA_API Strategy plugin_strategy(std::string_view name);

/// The collective FILE.so:NAME; throws as plugin_strategy(). What its maker throws, that is none of our errors, comes
/// out as InvalidUsage with its name.
TESSERA_API OfferedCollective plugin_collective(comm::OpKind collective, std::string_view name);
/// Whether the file has it for this collective. Throws where the file can't be loaded.
TESSERA_API bool has_plugin_collective(comm::OpKind collective, std::string_view name);

}  // namespace tessera::fsdp

/// Once in a shared object: makes what the function returns its offer.
#define TESSERA_FSDP_PLUGIN(offer)                                                                      \
  extern "C" TESSERA_API const tessera_fsdp_plugin* tessera_fsdp_plugin_entry() {                       \
    static const tessera_fsdp_plugin plugin = tessera::fsdp::plugin_of<offer>(TESSERA_FSDP_PLUGIN_ABI); \
    return &plugin;                                                                                     \
  }
