// How a model is cut vertically into units.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/fsdp/types.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Modules whose parameters are gathered and reduced together.
struct UnitSpec {
  std::string name;                                        ///< "h.3", "ln_f+lm_head"; what is left over is "root"
  std::vector<nn::Module*> modules;                        ///< in order of registration
  std::vector<std::shared_ptr<nn::Parameter>> parameters;  ///< those that no earlier unit has
  bool is_root = false;
};

/// SPEC: "none" (one unit), "block" (each block), "size:N" (a module with at least N parameters that are not yet in a
/// unit inside it), "type:NAME" (each module of that class, see type_name()), or a list: ';' between units, '+'
/// joins modules, "block" and "type:NAME" inside it stand for all of them: "block;wte;ln_f+lm_head". Units come in
/// forward order: the root first (if it holds parameters), then in order of registration. A tied parameter belongs to
/// the lowest module that holds all its uses; in practice the root. Throws InvalidUsage for a spec that names nothing.
/// Parameters that are `ignored` (empty: none) are in no unit.
using IgnoredParameters = std::function<bool(const nn::Parameter&)>;
TESSERA_API std::vector<UnitSpec> make_units(nn::Module& model, std::string_view spec,
                                             const IgnoredParameters& ignored = {});
/// The same with a unit for each module, the root apart, that is chosen.
using WrapPolicy = std::function<bool(const nn::Module&)>;
TESSERA_API std::vector<UnitSpec> make_units(nn::Module& model, const WrapPolicy& chosen,
                                             const IgnoredParameters& ignored = {});

/// The modules that an item of such a list names: "type:NAME", or a path. Throws InvalidUsage that says what there is;
/// `option` begins it.
TESSERA_API std::vector<nn::Module*> modules_named(nn::Module& model, std::string_view item, std::string_view option);

/// Name of its class, without namespaces: "Linear".
TESSERA_API std::string type_name(const nn::Module& module);

/// What gathering a unit that is kept for the whole step holds for nothing: its parameters that one module inside it
/// alone uses, which could be a unit of its own.
struct RootOverhead {
  const nn::Module* module = nullptr;
  std::int64_t elements = 0;
};
TESSERA_API std::vector<RootOverhead> needlessly_held(nn::Module& model, const UnitSpec& unit);

}  // namespace tessera::fsdp
