# A CMake toolchain for 64-bit Arm, with Debian's cross compiler (g++-aarch64-linux-gnu):
#   cmake -S . -B build/arm64 --toolchain cmake/arm64.cmake -DTESSERA_ARM64_SYSROOT=FOLDER -DTESSERA_CUDA=OFF
# The folder holds unpacked packages of Debian for arm64, which `scripts/arm64 sysroot` fetches. Programs of the build run under
# qemu-aarch64-static, if it is here (Debian's qemu-user-static): CTest and GoogleTest's list of cases use it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(TESSERA_ARM64_SYSROOT ${CMAKE_CURRENT_LIST_DIR}/../build/arm64-sysroot CACHE PATH "Unpacked packages for arm64")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_ARM64_SYSROOT)
cmake_path(ABSOLUTE_PATH TESSERA_ARM64_SYSROOT NORMALIZE OUTPUT_VARIABLE CMAKE_SYSROOT)
if(NOT EXISTS ${CMAKE_SYSROOT}/usr/include)
  message(FATAL_ERROR " ${CMAKE_SYSROOT} has no usr/include: scripts/arm64 sysroot fetches the packages for arm64")
endif()

# Programs are the host's; everything else is the target's.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_DIR} "")
set(ENV{PKG_CONFIG_LIBDIR} ${CMAKE_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${CMAKE_SYSROOT}/usr/share/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${CMAKE_SYSROOT})

find_program(QEMU_AARCH64 qemu-aarch64-static)
if(QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${QEMU_AARCH64} -L ${CMAKE_SYSROOT})
endif()
