# The CUDA device: a loadable module, tessera-modules/devices/cuda.so, built if there is a CUDA compiler. Programs start without any
# vendor library: the module contains the runtime library and loads the driver and cuBLASLt on first use.
include(${CMAKE_CURRENT_LIST_DIR}/module.cmake)
include(CheckLanguage)

if(NOT TESSERA_CUDA)
  device_not_built(cuda "left out of this build: -DTESSERA_CUDA=OFF")
  return()
endif()
if(TESSERA_SANITIZE)
  device_not_built(cuda "its compiler has no host sanitizers")
  return()
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  device_not_built(cuda "no CUDA compiler here (NVIDIA's packages of the CUDA toolkit)")
  return()
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90)
endif()
if(CMAKE_CXX_COMPILER_LAUNCHER AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)
  device_not_built(cuda
    "CUDA is version ${CMAKE_CUDA_COMPILER_VERSION}, needs 12.5 or newer, whose run-time library finds the driver's functions by version")
  return()
endif()
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 doesn't know this compiler's option
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
# CMake's own search for the toolkit is not used: in Debian 12 it fails for a toolkit without nvToolsExt, such as CUDA 13.
find_library(TESSERA_CUDART_STATIC cudart_static HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
if(NOT TESSERA_CUDART_STATIC)
  device_not_built(cuda "no libcudart_static.a beside the CUDA compiler (NVIDIA's packages of the CUDA toolkit)")
  return()
endif()
cmake_path(GET TESSERA_CUDART_STATIC PARENT_PATH TESSERA_CUDA_LIBRARIES)

# The same IEEE operations as on the host: fused multiply-adds occur only where the source has them.
add_library(tessera_cuda_kernels OBJECT ${PROJECT_SOURCE_DIR}/src/comm/kernels/cuda/reduce.cu)
if(NOT TESSERA_COMM_ONLY)
  target_sources(tessera_cuda_kernels PRIVATE ${PROJECT_SOURCE_DIR}/src/nn/kernels/cuda/kernels.cu)
endif()
target_include_directories(tessera_cuda_kernels PRIVATE ${TESSERA_INCLUDE_DIR})
target_compile_options(tessera_cuda_kernels PRIVATE --split-compile=0 -fmad=false --expt-relaxed-constexpr
  -Xcompiler=-Wall,-fvisibility=hidden,-ffp-contract=off)
if(TESSERA_WERROR)
  target_compile_options(tessera_cuda_kernels PRIVATE -Werror=all-warnings)
endif()

list(GET CMAKE_CUDA_ARCHITECTURES 0 least)
string(REGEX MATCH "^[0-9]+" least "${least}")
set(sources
  ${PROJECT_SOURCE_DIR}/src/base/cuda/device_guard.cpp
  ${PROJECT_SOURCE_DIR}/src/base/cuda/ipc.cpp
  ${PROJECT_SOURCE_DIR}/src/base/cuda/module.cpp
  ${PROJECT_SOURCE_DIR}/src/base/cuda/runtime.cpp
  ${PROJECT_SOURCE_DIR}/src/base/cuda/stream.cpp
  $<TARGET_OBJECTS:tessera_cuda_kernels>)
if(TESSERA_COMM_ONLY)
  tessera_comm_module(tessera_device_cuda cuda ${sources} ${PROJECT_SOURCE_DIR}/src/base/cuda/no_nn.cpp)
else()
  tessera_module(tessera_device_cuda cuda ${sources}
    ${PROJECT_SOURCE_DIR}/src/nn/kernels/cuda/matmul.cpp
    ${PROJECT_SOURCE_DIR}/src/nn/kernels/cuda/matmul_choices.cpp
    ${PROJECT_SOURCE_DIR}/src/nn/kernels/cuda/matmul_table.cpp
    ${PROJECT_SOURCE_DIR}/src/nn/kernels/vendor_library.cpp)
  include(${CMAKE_CURRENT_LIST_DIR}/cudnn.cmake)
endif()
target_compile_definitions(tessera_device_cuda PRIVATE TESSERA_CUDA_LEAST_GENERATION=${least})
target_include_directories(tessera_device_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(tessera_device_cuda PRIVATE tessera_options ${TESSERA_CUDART_STATIC} Threads::Threads ${CMAKE_DL_LIBS} rt)
# cuBLASLt's folder at build time is searched, too: the loader does not search NVIDIA's own folders.
set_target_properties(tessera_device_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tessera-modules/devices
  INSTALL_RPATH "$ORIGIN/../..;${TESSERA_CUDA_LIBRARIES};${TESSERA_CUDNN_FOLDER}")
tessera_final_rpath(tessera_device_cuda)
set_property(GLOBAL APPEND PROPERTY TESSERA_DEVICE_MODULES tessera_device_cuda)
