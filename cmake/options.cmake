# What every target of the project is compiled with.
add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE
  -Wall -Wextra -Wpedantic -Wno-restrict  # GCC 12 sees overlaps in std::string where there are none (PR 105651)
  -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-missing-field-initializers
  # The same IEEE operations wherever an element lies: a fused multiply-add happens only where the source asks for one.
  -ffp-contract=off -fno-math-errno)
if(TESSERA_WERROR)
  target_compile_options(tessera_options INTERFACE -Werror)
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
target_link_libraries(tessera_options INTERFACE Threads::Threads)

# Headers are spelled "tessera/comm/communicator.h" here as in a program that uses the installed package.
set(TESSERA_INCLUDE_DIR ${PROJECT_BINARY_DIR}/include)
file(MAKE_DIRECTORY ${TESSERA_INCLUDE_DIR})
file(CREATE_LINK ${PROJECT_SOURCE_DIR}/src ${TESSERA_INCLUDE_DIR}/tessera SYMBOLIC)
target_include_directories(tessera_options INTERFACE ${TESSERA_INCLUDE_DIR})
