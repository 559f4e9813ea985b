# tessera_public_headers(OUT): the installed headers, relative to src/: those directly in a layer's folder, or in one of nn's
# folders below. Deeper headers and those ending in -inl.h are private.
function(tessera_public_headers out)
  set(source ${PROJECT_SOURCE_DIR}/src)
  file(GLOB found CONFIGURE_DEPENDS RELATIVE ${source}
    ${source}/base/*.h ${source}/comm/*.h ${source}/nn/*.h ${source}/fsdp/*.h ${source}/plan/*.h ${source}/libtorch/*.h
    ${source}/nn/kernels/*.h ${source}/nn/layers/*.h ${source}/nn/models/*.h ${source}/nn/ops/*.h)
  list(FILTER found EXCLUDE REGEX "-inl[.]h$")
  set(${out} ${found} PARENT_SCOPE)
endfunction()
