// How a model is cut vertically into units.
#pragma once

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
/// unit inside it), or a list: ';' between units, '+' joins modules, "block" inside it stands for all blocks:
/// "block;wte;ln_f+lm_head". Units come in forward order: the root first (if it holds parameters), then in order of
/// registration. A tied parameter belongs to the lowest module that holds all its uses; in practice the root. Throws
/// InvalidUsage for a spec that names nothing.
TESSERA_API std::vector<UnitSpec> make_units(nn::Module& model, std::string_view spec);

}  // namespace tessera::fsdp
