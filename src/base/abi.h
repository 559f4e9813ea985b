// The ABI of a library and its loadable modules, as one string that both sides compare.
#pragma once

// The ABI string: what two parts of a program must have in common before they exchange C++ objects. A macro, since the
// linker would merge a variable with the library's, and the two would always agree.
#define TESSERA_ABI_TEXT_(x) #x
#define TESSERA_ABI_TEXT(x) TESSERA_ABI_TEXT_(x)
// Increment it whenever a class or struct in the headers of base, comm or a device's table changes.
#define TESSERA_ABI_NUMBER 23

#if defined(__clang__)
#define TESSERA_ABI_COMPILER "clang " TESSERA_ABI_TEXT(__clang_major__)
#elif defined(__GNUC__)
#define TESSERA_ABI_COMPILER "gcc " TESSERA_ABI_TEXT(__GNUC__)
#else
#error "abi.h: unknown compiler"
#endif

#if defined(_LIBCPP_ABI_VERSION)
#define TESSERA_ABI_STANDARD_LIBRARY "libc++ abi " TESSERA_ABI_TEXT(_LIBCPP_ABI_VERSION)
#elif defined(_GLIBCXX_DEBUG)
#define TESSERA_ABI_STANDARD_LIBRARY \
  "libstdc++ " TESSERA_ABI_TEXT(_GLIBCXX_RELEASE) " cxx11-abi " TESSERA_ABI_TEXT(_GLIBCXX_USE_CXX11_ABI) " debug"
#else
#define TESSERA_ABI_STANDARD_LIBRARY \
  "libstdc++ " TESSERA_ABI_TEXT(_GLIBCXX_RELEASE) " cxx11-abi " TESSERA_ABI_TEXT(_GLIBCXX_USE_CXX11_ABI)
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_ABI_SANITIZER "address sanitizer"
#elif __has_feature(thread_sanitizer)
#define TESSERA_ABI_SANITIZER "thread sanitizer"
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define TESSERA_ABI_SANITIZER "address sanitizer"
#elif defined(__SANITIZE_THREAD__)
#define TESSERA_ABI_SANITIZER "thread sanitizer"
#endif
#ifndef TESSERA_ABI_SANITIZER
#define TESSERA_ABI_SANITIZER "no sanitizer"
#endif

#define TESSERA_ABI                                                                                           \
  "tessera " TESSERA_ABI_TEXT(TESSERA_ABI_NUMBER) ", " TESSERA_ABI_COMPILER ", " TESSERA_ABI_STANDARD_LIBRARY \
                                                  ", " TESSERA_ABI_SANITIZER
