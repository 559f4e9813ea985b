#include "tessera/nn/products.h"

#include <optional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/variables.h"

namespace tessera::nn {

Products parse_products(std::string_view text) {
  if (text == "library") return Products::library;
  if (text == "own") return Products::own;
  throw base::InvalidUsage(std::string(kProductsVariable.name) + " is '" + std::string(text) +
                           "', needs own or library");
}

std::string_view name_of(Products products) { return products == Products::own ? "own" : "library"; }

Products products_of_environment(Products otherwise) {
  const std::optional<std::string> text = base::read_env(kProductsVariable);
  return text ? parse_products(*text) : otherwise;
}

}  // namespace tessera::nn
