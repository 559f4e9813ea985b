#include "tessera/nn/kernels/vendor_library.h"

#include <dlfcn.h>

#include <utility>

namespace tessera::nn::kernels {

VendorLibrary::VendorLibrary(const std::string& file, std::string name)
    : name_(std::move(name)), handle_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ != nullptr) return;
  const char* text = ::dlerror();
  problem_ = text != nullptr ? text : file + " can't be loaded";
}

void* VendorLibrary::address_of(const char* function_name) {
  void* const address = handle_ != nullptr ? ::dlsym(handle_, function_name) : nullptr;
  if (address == nullptr && problem_.empty()) problem_ = name_ + " has no " + function_name;
  return address;
}

}  // namespace tessera::nn::kernels
