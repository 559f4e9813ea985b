# tessera_public_headers(OUT): the headers that are installed, relative to src/. Those in a folder named internal or
# detail, and those that end in -inl.h, are the project's own.
function(tessera_public_headers out)
  file(GLOB_RECURSE found CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src
    ${PROJECT_SOURCE_DIR}/src/base/*.h ${PROJECT_SOURCE_DIR}/src/comm/*.h
    ${PROJECT_SOURCE_DIR}/src/nn/*.h ${PROJECT_SOURCE_DIR}/src/fsdp/*.h)
  list(FILTER found EXCLUDE REGEX "/(internal|detail)/|-inl[.]h$")
  set(${out} ${found} PARENT_SCOPE)
endfunction()
