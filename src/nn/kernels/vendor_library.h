// A vendor's library that is loaded at run time, so that the program also starts on systems without it.
#pragma once

#include <string>

namespace tessera::nn::kernels {

/// Used by one thread.
class VendorLibrary {
 public:
  /// Loads `file` and never unloads it. `name`: the library's, for problem().
  VendorLibrary(const std::string& file, std::string name);

  /// Sets `function` to the library's function of this name; null if there is none.
  template <class Function>
  void find(const char* function_name, Function& function) {
    function = reinterpret_cast<Function>(address_of(function_name));
  }
  /// Why the library can't be used: it can't be loaded, or lacks a function. "": it can.
  const std::string& problem() const { return problem_; }

 private:
  void* address_of(const char* function_name);
  std::string name_;
  std::string problem_;
  void* handle_ = nullptr;
};

}  // namespace tessera::nn::kernels
