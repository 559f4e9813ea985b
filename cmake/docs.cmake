# The target `docs`: an API reference by Doxygen of the headers that are installed, in docs/html of the build folder.
find_program(TESSERA_DOXYGEN doxygen)
if(NOT TESSERA_DOXYGEN)
  add_custom_target(docs COMMAND ${CMAKE_COMMAND} -E echo "docs: Doxygen is missing: apt-get install doxygen"
    COMMAND ${CMAKE_COMMAND} -E false)
  return()
endif()
tessera_public_headers(headers)
list(TRANSFORM headers PREPEND ${PROJECT_SOURCE_DIR}/src/)
list(JOIN headers " " TESSERA_DOCUMENTED)
configure_file(${PROJECT_SOURCE_DIR}/docs/Doxyfile.in ${PROJECT_BINARY_DIR}/docs/Doxyfile @ONLY)
add_custom_target(docs COMMAND ${TESSERA_DOXYGEN} ${PROJECT_BINARY_DIR}/docs/Doxyfile
  COMMAND ${CMAKE_COMMAND} -E echo "docs: ready: ${PROJECT_BINARY_DIR}/docs/html/index.html" VERBATIM)
