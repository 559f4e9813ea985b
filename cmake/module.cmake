# tessera_module(TARGET FILE SOURCES...): a loadable module FILE.so with a backend (tessera/comm/plugin.h; FILE is BACKEND or
# BACKEND-VARIANT), or with collectives and strategies (tessera/fsdp/plugin.h). Part of the installed package: outside plug-ins
# use it, too. tessera_comm_module(...): the same for a backend, which then also works without the engine's library.
function(tessera_comm_module target file)
  add_library(${target} MODULE ${ARGN})
  set_target_properties(${target} PROPERTIES PREFIX "" SUFFIX ".so" OUTPUT_NAME ${file}
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_link_libraries(${target} PRIVATE tessera::comm)
  target_link_options(${target} PRIVATE LINKER:--no-undefined)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)  # the same sums on every processor
endfunction()
function(tessera_module target file)
  tessera_comm_module(${target} ${file} ${ARGN})
  target_link_libraries(${target} PRIVATE tessera::tessera)
endfunction()
