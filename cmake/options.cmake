# Compile options of every target of the project.
add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-missing-field-initializers
  # The same IEEE operations for each element, whatever its position: fused multiply-adds occur only where the source has them.
  -ffp-contract=off -fno-math-errno)
set(gcc OFF)  # clang knows other warnings
set(gcc_12 OFF)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(gcc ON)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    set(gcc_12 ON)
  endif()
endif()
if(gcc_12)
  target_compile_options(tessera_options INTERFACE -Wno-restrict)  # it reports false overlaps in std::string (PR 105651)
endif()
if(gcc AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  target_compile_options(tessera_options INTERFACE -Wno-psabi)  # notes that GCC 9 passed some pairs in another way
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # clang 19 reports what the std::stable_sort of GCC 12's library itself calls.
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS "-std=c++20 -Wdeprecated-declarations -Werror")
  check_cxx_source_compiles("#include <algorithm>
    int main() { int a[2] = {}; std::stable_sort(a, a + 2); }" TESSERA_STABLE_SORT_WITHOUT_WARNING)
  unset(CMAKE_REQUIRED_FLAGS)
  if(NOT TESSERA_STABLE_SORT_WITHOUT_WARNING)
    target_compile_options(tessera_options INTERFACE -Wno-deprecated-declarations)
  endif()
endif()
if(TESSERA_WERROR)
  target_compile_options(tessera_options INTERFACE -Werror)
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer)
  if(gcc)  # it takes parts of std::optional and <regex> for uninitialized when sanitizers instrument them
    target_compile_options(tessera_options INTERFACE -Wno-maybe-uninitialized)
  endif()
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
  if(TESSERA_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # It ignores fences, and warns of each. Those here order what it doesn't see: reads by the kernel and by other processes. Asio has
    # mutexes beside its own.
    target_compile_options(tessera_options INTERFACE -Wno-tsan)
  endif()
endif()
target_link_libraries(tessera_options INTERFACE Threads::Threads)

# What distributions build with. Protectors of the stack and checks of the C library, which need optimization, cost nothing that can be
# measured (docs/security.md). Sanitizers check more, and replace the same functions.
if(NOT TESSERA_SANITIZE)
  set(fortify 2)
  if(gcc AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
    set(fortify 3)
  endif()
  set(optimized "$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>")
  target_compile_options(tessera_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong>
    "$<${optimized}:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=${fortify}>")
  target_link_options(tessera_options INTERFACE -Wl,-z,relro)
  # Checks of the C++ library, and tables of addresses that are complete and read-only before the program starts.
  if(TESSERA_HARDENING)
    target_compile_options(tessera_options INTERFACE "$<${optimized}:-D_GLIBCXX_ASSERTIONS>")
    target_link_options(tessera_options INTERFACE -Wl,-z,now)
  endif()
endif()

# Boost.Asio with its coroutines. Boost 1.74 finds those of the standard library only for GCC.
add_library(tessera_asio INTERFACE)
target_link_libraries(tessera_asio INTERFACE Boost::headers)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_definitions(tessera_asio INTERFACE BOOST_ASIO_HAS_CO_AWAIT=1 BOOST_ASIO_HAS_STD_COROUTINE=1)
endif()

# Headers are included as "tessera/comm/communicator.h", as in a program that uses the installed package.
set(TESSERA_INCLUDE_DIR ${PROJECT_BINARY_DIR}/include)
file(MAKE_DIRECTORY ${TESSERA_INCLUDE_DIR})
file(CREATE_LINK ${PROJECT_SOURCE_DIR}/src ${TESSERA_INCLUDE_DIR}/tessera SYMBOLIC)
target_include_directories(tessera_options INTERFACE ${TESSERA_INCLUDE_DIR})
