# Parsing the standard library takes half of a file's compile time: the library's targets share one precompiled header,
# the tool has another. Release only: the other builds reveal files that don't include what they use.
# -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON builds without.
set(TESSERA_PRECOMPILED OFF)
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  set(TESSERA_PRECOMPILED ON)
endif()
set(TESSERA_STANDARD_HEADERS <algorithm> <array> <atomic> <chrono> <condition_variable> <cstdint> <cstring> <deque>
  <functional> <map> <memory> <mutex> <optional> <span> <string> <string_view> <thread> <utility> <vector>)

# tessera_precompile(TARGET): uses the library's precompiled header, which the first target builds.
function(tessera_precompile target)
  if(NOT TESSERA_PRECOMPILED)
    return()
  endif()
  if(gcc_12)  # for a precompiled <string> it prints warnings that it suppresses for the plain header (PR 105651)
    target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-stringop-overflow)
  endif()
  get_property(first GLOBAL PROPERTY TESSERA_PRECOMPILED_BY)
  if(first)
    target_precompile_headers(${target} REUSE_FROM ${first})
  else()
    target_precompile_headers(${target} PRIVATE ${TESSERA_STANDARD_HEADERS})
    set_property(GLOBAL PROPERTY TESSERA_PRECOMPILED_BY ${target})
  endif()
endfunction()

# tessera_layer(NAME SOURCES ... [LINK ...]): one folder of src/ = one object library = one namespace.
function(tessera_layer name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  add_library(tessera_${name} OBJECT ${arg_SOURCES})
  target_link_libraries(tessera_${name} PUBLIC tessera_options PRIVATE ${arg_LINK})
  tessera_precompile(tessera_${name})
endfunction()

# Factor on test timeouts: sanitizers and emulators make tests 3 to 20 times slower.
set(TESSERA_PATIENCE 1)
if(TESSERA_SANITIZE OR CMAKE_CROSSCOMPILING)
  set(TESSERA_PATIENCE 3)
endif()

# tessera_compile_together(TARGET [FILE...]): a release build compiles several of its files at a time, since parsing the same headers
# takes most of each one's time. Not so these FILEs: their helpers have the names of others.
function(tessera_compile_together target)
  if(TESSERA_PRECOMPILED)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
endfunction()

# tessera_test(NAME SOURCES ... [ALONE FILE...] [LABELS ...] [LINK ...] [TIMEOUT n] [WHOLE] [SERIAL] [SMOKE])
# One executable of GoogleTest cases, registered case by case. WHOLE: one ctest entry for the whole executable. ALONE: those of the
# SOURCES that are not compiled together with others, see tessera_compile_together().
# SERIAL: no other test runs at the same time. SMOKE: all cases in one process are a part of scripts/test --smoke; they take seconds.
function(tessera_test name)
  cmake_parse_arguments(arg "WHOLE;SERIAL;SMOKE" "TIMEOUT" "SOURCES;ALONE;LABELS;LINK" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * ${TESSERA_PATIENCE}")
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  add_executable(test_${name} ${arg_SOURCES})
  target_link_libraries(test_${name} PRIVATE tessera tessera_options GTest::gtest GTest::gmock GTest::gtest_main ${arg_LINK})
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR})
  set_target_properties(test_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_precompile_headers(test_${name} REUSE_FROM tests_precompiled)
  tessera_compile_together(test_${name} ${arg_ALONE})
  if(arg_WHOLE)
    add_test(NAME ${name} COMMAND test_${name})
    set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
  else()
    gtest_discover_tests(test_${name} TEST_PREFIX ${name}. DISCOVERY_TIMEOUT 60
      PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} RUN_SERIAL ${arg_SERIAL})
  endif()
  if(arg_SMOKE)
    add_test(NAME smoke.${name} COMMAND test_${name})
    set_tests_properties(smoke.${name} PROPERTIES LABELS smoke TIMEOUT ${arg_TIMEOUT})
  endif()
endfunction()

# tessera_final_rpath(TARGET): links a target that is installed with the search path that it has then, so that the build tree needs the
# same layout. Otherwise CMake pads the path of the build tree, and the loader takes an empty entry for the current directory.
function(tessera_final_rpath target)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
endfunction()
