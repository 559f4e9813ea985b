// Wrapping: how a model is divided into units.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/fsdp/model.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// Modules whose parameters are unsharded and reduced together.
struct UnitSpec {
  std::string name;                                    ///< "h.3", "ln_f+lm_head"; the rest of the model is "root"
  std::vector<Module*> modules;                        ///< modules in order of registration
  std::vector<std::shared_ptr<Parameter>> parameters;  ///< those that are in no earlier unit
  bool is_root = false;                                ///< holds what no other unit holds
};

/// Selects parameters that are in no unit; empty: none.
using IgnoredParameters = std::function<bool(const Parameter&)>;
/// Divides a model into units. SPEC is "none" (one unit), "block" (each block), "size:N" (a module with at least N
/// parameters that are not yet in a unit inside it), "type:NAME" (each module of that class, see Module::type()), or a
/// list: ';' separates units, '+' joins modules; "block" and "type:NAME" inside a list stand for one unit per module:
/// "block;wte;ln_f+lm_head". Units are in forward order: the root first (if it holds parameters), then in order of
/// registration. A tied parameter belongs to the lowest module that contains all its uses; in practice the root.
/// `ignored` parameters (empty: none) are in no unit. Throws InvalidUsage for a spec that names nothing.
TESSERA_API std::vector<UnitSpec> make_units(Module& model, std::string_view spec,
                                             const IgnoredParameters& ignored = {});
/// Selects modules that become units.
using WrapPolicy = std::function<bool(const Module&)>;
/// The same with a unit for each module except the root that `chosen` selects.
TESSERA_API std::vector<UnitSpec> make_units(Module& model, const WrapPolicy& chosen,
                                             const IgnoredParameters& ignored = {});

/// The modules that an item of such a list names: "type:NAME", or a path. Throws InvalidUsage that lists the available
/// ones; its message begins with `option`.
TESSERA_API std::vector<Module*> modules_named(Module& model, std::string_view item, std::string_view option);

/// Parameters of one module that a unit holds unnecessarily; see needlessly_held().
struct RootOverhead {
  const Module* module = nullptr;  ///< the only module that uses them
  std::int64_t elements = 0;       ///< elements of its parameters
};
/// Parameters that a unit kept for the whole step holds unnecessarily: those that only one module inside it uses, which
/// could be a unit of its own. One entry per module.
TESSERA_API std::vector<RootOverhead> needlessly_held(Module& model, const UnitSpec& unit);

}  // namespace tessera::fsdp
