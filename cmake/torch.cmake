# Finds libtorch's headers and libraries, as tessera::torch. Without Torch's own package file: that of a Torch for CUDA fails where the
# toolkit is not the one it wants. Debian's libtorch-dev is found by itself; PyPI's torch by the folder that
# `python -c "import torch; print(torch.utils.cmake_prefix_path)"` prints, in CMAKE_PREFIX_PATH. Part of the installed package.
# Sets TESSERA_TORCH_MISSING to the reason if there is none that can be used, else TESSERA_TORCH_VERSION, such as 2.7.
set(hints)
foreach(prefix ${CMAKE_PREFIX_PATH})
  list(APPEND hints ${prefix}/../..)  # torch/share/cmake
endforeach()
find_path(TESSERA_TORCH_INCLUDE torch/csrc/api/include/torch/torch.h HINTS ${hints} PATH_SUFFIXES include)
find_library(TESSERA_TORCH_LIBRARY torch_cpu HINTS ${hints} PATH_SUFFIXES lib)
set(TESSERA_TORCH_MISSING "")
if(NOT TESSERA_TORCH_INCLUDE OR NOT TESSERA_TORCH_LIBRARY)
  set(TESSERA_TORCH_MISSING "no libtorch here (Debian's package libtorch-dev)")
  return()
endif()
cmake_path(GET TESSERA_TORCH_LIBRARY PARENT_PATH TESSERA_TORCH_FOLDER)
file(STRINGS ${TESSERA_TORCH_INCLUDE}/torch/csrc/api/include/torch/version.h version
  REGEX "define TORCH_VERSION_(MAJOR|MINOR) [0-9]+")
string(REGEX REPLACE "[^0-9;]" "" version "${version}")
string(REPLACE ";" "." TESSERA_TORCH_VERSION "${version}")
if(NOT TARGET tessera::torch)
  add_library(tessera::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(tessera::torch SYSTEM INTERFACE ${TESSERA_TORCH_INCLUDE}
    ${TESSERA_TORCH_INCLUDE}/torch/csrc/api/include)
  target_link_libraries(tessera::torch INTERFACE -Wl,--no-as-needed ${TESSERA_TORCH_FOLDER}/libtorch.so -Wl,--as-needed
    ${TESSERA_TORCH_LIBRARY} ${TESSERA_TORCH_FOLDER}/libc10.so)
endif()
# PyPI's before 2.7 have std::string of the old ABI.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS -std=c++20)
set(CMAKE_REQUIRED_INCLUDES ${TESSERA_TORCH_INCLUDE})
set(CMAKE_REQUIRED_LIBRARIES ${TESSERA_TORCH_FOLDER}/libc10.so)
check_cxx_source_compiles("#include <c10/core/Device.h>
  int main() { return c10::Device(std::string(\"cpu\")).str().empty(); }" TESSERA_TORCH_HAS_THIS_ABI)
unset(CMAKE_REQUIRED_FLAGS)
unset(CMAKE_REQUIRED_INCLUDES)
unset(CMAKE_REQUIRED_LIBRARIES)
if(NOT TESSERA_TORCH_HAS_THIS_ABI)
  set(TESSERA_TORCH_MISSING "${TESSERA_TORCH_LIBRARY} has another C++ ABI than this compiler; use Debian's libtorch-dev or PyPI's torch 2.7 or newer")
endif()
