#include "tessera/fsdp/model.h"

#include <cxxabi.h>

#include <cstdlib>

#include "tessera/base/error.h"

namespace tessera::fsdp {

ModelTensor::~ModelTensor() = default;
Module::~Module() = default;
Runtime::~Runtime() = default;
Model::~Model() = default;

void Model::checkpoint_activations() {
  throw Unsupported("this model's library can't recompute activations here; models of tessera::nn and libtorch can");
}

std::string class_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> whole(abi::__cxa_demangle(type.name(), nullptr, nullptr, &status),
                                                     &std::free);
  const std::string name = status == 0 ? whole.get() : type.name();
  const std::size_t colon = name.rfind(':');
  return colon == std::string::npos ? name : name.substr(colon + 1);
}

std::vector<Module*> Module::modules() { return base::modules_of(*this); }

std::vector<std::shared_ptr<Parameter>> Module::parameters() const {
  return base::parameters_of(base::modules_of(*this));
}

std::vector<std::shared_ptr<ModuleBuffer>> Module::buffers() const {
  std::vector<std::shared_ptr<ModuleBuffer>> all = own_buffers_;
  for (const auto& child : children_)
    for (auto& buffer : child->buffers()) all.push_back(std::move(buffer));
  return all;
}

Module& Module::find(std::string_view path) { return base::module_at(*this, path); }

}  // namespace tessera::fsdp
