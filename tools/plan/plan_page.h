// The page of tessera plan --model: pictures and tables of simulated steps.
#pragma once

#include <optional>
#include <string>

#include "tools/plan/advisor.h"
#include "tools/plan/model_plan.h"
#include "tools/results/why.h"

namespace tessera::tools {

/// One self-contained HTML file.
std::string plan_page(const ModelPlan& plan, const std::optional<Scaling>& scaling, const std::optional<Advice>& advice,
                      const std::optional<Why>& why);

}  // namespace tessera::tools
