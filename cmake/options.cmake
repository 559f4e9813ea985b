# Compile options of every target of the project.
add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE
  -Wall -Wextra -Wpedantic -Wno-restrict  # GCC 12 reports false overlaps in std::string (PR 105651)
  -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-missing-field-initializers
  # The same IEEE operations for each element, whatever its position: fused multiply-adds occur only where the source has them.
  -ffp-contract=off -fno-math-errno)
if(TESSERA_WERROR)
  target_compile_options(tessera_options INTERFACE -Werror)
endif()
if(TESSERA_SANITIZE)
  # GCC 12 takes parts of std::optional and <regex> for uninitialized when sanitizers instrument them.
  target_compile_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer
    -Wno-maybe-uninitialized)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
  if(TESSERA_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # It ignores fences, and warns of each. Those here order what it doesn't see: reads by the kernel and by other processes.
    target_compile_options(tessera_options INTERFACE -Wno-tsan)
  endif()
endif()
target_link_libraries(tessera_options INTERFACE Threads::Threads)

# Headers are included as "tessera/comm/communicator.h", as in a program that uses the installed package.
set(TESSERA_INCLUDE_DIR ${PROJECT_BINARY_DIR}/include)
file(MAKE_DIRECTORY ${TESSERA_INCLUDE_DIR})
file(CREATE_LINK ${PROJECT_SOURCE_DIR}/src ${TESSERA_INCLUDE_DIR}/tessera SYMBOLIC)
target_include_directories(tessera_options INTERFACE ${TESSERA_INCLUDE_DIR})
