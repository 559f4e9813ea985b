// The section of a page about other links, ranks and batches.
#pragma once

#include <string>

#include "tools/results/what_if.h"

namespace tessera::tools::pages {

std::string what_if_section(const WhatIf& what_if);

}  // namespace tessera::tools::pages
