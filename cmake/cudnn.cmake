# cuDNN's attention for the CUDA device. Only its header is needed: the library is loaded on first use. The header belongs to NVIDIA's
# package of cuDNN 9 for the system or the toolkit, or to PyPI's nvidia-cudnn-cu13, whose folder TESSERA_CUDNN_INCLUDE may name.
set(kernels ${PROJECT_SOURCE_DIR}/src/nn/kernels/cuda)
find_path(TESSERA_CUDNN_INCLUDE cudnn_graph.h HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} PATHS /usr/local/cuda/include)
set(TESSERA_CUDNN_FOLDER "")
set(cudnn_version 0)
if(TESSERA_CUDNN_INCLUDE)
  file(STRINGS ${TESSERA_CUDNN_INCLUDE}/cudnn_version.h lines REGEX "#define CUDNN_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9]+([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2" cudnn_version "${lines}")
endif()
if(cudnn_version VERSION_LESS 9.8 OR cudnn_version VERSION_GREATER_EQUAL 10)
  message(STATUS "Attention on cuda is this library's alone: no cudnn_graph.h of cuDNN 9.8 or newer here (NVIDIA's packages of cuDNN 9)")
  target_sources(tessera_device_cuda PRIVATE ${kernels}/no_cudnn.cpp)
  return()
endif()
set(TESSERA_CUDNN_SOURCES ${kernels}/cudnn_attention.cpp ${kernels}/cudnn_attention_graph.cpp ${kernels}/cudnn_graph.cpp)
target_sources(tessera_device_cuda PRIVATE ${TESSERA_CUDNN_SOURCES})
target_include_directories(tessera_device_cuda SYSTEM PRIVATE ${TESSERA_CUDNN_INCLUDE})
# The library's folder at build time is searched, too: the loader does not search NVIDIA's own folders.
find_library(TESSERA_CUDNN_LIBRARY NAMES libcudnn.so.9 HINTS ${TESSERA_CUDNN_INCLUDE}/../lib ${TESSERA_CUDA_LIBRARIES}
  PATHS /usr/local/cuda/lib64)
if(TESSERA_CUDNN_LIBRARY)
  cmake_path(GET TESSERA_CUDNN_LIBRARY PARENT_PATH TESSERA_CUDNN_FOLDER)
endif()
