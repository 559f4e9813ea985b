# tessera_public_headers(OUT): the headers that are installed, relative to src/: those that lie directly in the folder of a
# layer, or in one of nn's folders below. Deeper ones, and those that end in -inl.h, are the project's own.
function(tessera_public_headers out)
  set(source ${PROJECT_SOURCE_DIR}/src)
  file(GLOB found CONFIGURE_DEPENDS RELATIVE ${source}
    ${source}/base/*.h ${source}/comm/*.h ${source}/nn/*.h ${source}/fsdp/*.h
    ${source}/nn/kernels/*.h ${source}/nn/layers/*.h ${source}/nn/models/*.h ${source}/nn/ops/*.h)
  list(FILTER found EXCLUDE REGEX "-inl[.]h$")
  set(${out} ${found} PARENT_SCOPE)
endfunction()
