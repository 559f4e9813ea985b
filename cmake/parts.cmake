# The options: which parts are built. What the command line says wrongly, or what contradicts itself, ends the configuration with one line.

# tessera_refuse(MESSAGE [VARIABLE...]): ends it, and forgets the variables, so that the next call needs no -U.
function(tessera_refuse message)
  foreach(variable ${ARGN})
    unset(${variable} CACHE)
  endforeach()
  message(FATAL_ERROR " ${message}")  # CMake breaks no line that begins with a blank
endfunction()

# tessera_given(OUT NAME): whether the command line of this call gave the variable. To ask before its option().
function(tessera_given out name)
  set(${out} OFF PARENT_SCOPE)
  if(DEFINED CACHE{${name}})
    get_property(help CACHE ${name} PROPERTY HELPSTRING)
    if(help MATCHES "variable specified on the command line")
      set(${out} ON PARENT_SCOPE)
    endif()
  endif()
endfunction()

# tessera_switch(NAME HELP DEFAULT): an option that is on or off, and no word else.
macro(tessera_switch name help default)
  string(TOLOWER "${${name}}" value)
  if(DEFINED ${name} AND NOT value MATCHES "^(on|off|true|false|yes|no|y|n|1|0)$")
    tessera_refuse("${name} is '${${name}}'; it is ON or OFF" ${name})
  endif()
  option(${name} "${help}" ${default})
endmacro()

# The variables that the command line may set: options, and where to look for what.
set(known COMM_ONLY TOOL TESTS EXAMPLES BENCH WERROR HARDENING FUZZ DEFAULT_BACKEND SANITIZE CUDA MPI UCX ONEDNN LIBTORCH
  ARM64_SYSROOT NATIVE_TOOL BROWSER CBLAS_INCLUDE CLANG_FORMAT CUDA_INCLUDE CUDART_LIBRARY CUDART_STATIC CUDNN_INCLUDE CUDNN_LIBRARY D3 DEBIAN_PYTHON DOXYGEN GDB
  MPIRUN_mpich MPIRUN_openmpi NCCL_INCLUDE NCCL_LIBRARY ONEDNN_INCLUDE ONEDNN_LIBRARY OPENBLAS TORCH_INCLUDE
  TORCH_LIBRARY XXHASH XXHASH_INCLUDE)
list(TRANSFORM known PREPEND TESSERA_)
if(PROJECT_IS_TOP_LEVEL)  # another project may have such names of its own
  get_property(variables DIRECTORY PROPERTY CACHE_VARIABLES)
  foreach(variable ${variables})
    tessera_given(given ${variable})
    if(given AND variable MATCHES "^TESSERA_" AND NOT variable IN_LIST known)
      list(JOIN known " " known)
      tessera_refuse("${variable}: no such option; known: ${known}" ${variable})
    endif()
  endforeach()
endif()
if(DEFINED CACHE{TESSERA_ONEDNN})  # build folders from before this option hold the library's path under its name
  get_property(type CACHE TESSERA_ONEDNN PROPERTY TYPE)
  if(type STREQUAL "FILEPATH")
    unset(TESSERA_ONEDNN CACHE)
  endif()
endif()

tessera_switch(TESSERA_COMM_ONLY "Build communication only: tessera::comm and its backends, without BLAS, models, engine and tool" OFF)
# ON, the default of the next five, means: built where its compiler or headers are found. OFF leaves the part out whatever is found, as
# a cross compilation must, which would find those of the host.
tessera_switch(TESSERA_CUDA "Build the device cuda and the backend nccl where CUDA is found" ON)
tessera_switch(TESSERA_MPI "Build the backend mpi for each MPI that is found" ON)
tessera_switch(TESSERA_UCX "Build the backend ucx where UCX is found" ON)
tessera_switch(TESSERA_ONEDNN "Use oneDNN for matrix products where it is found" ON)
tessera_switch(TESSERA_LIBTORCH "Build tessera::libtorch where libtorch is found" ON)

tessera_given(tool_given TESSERA_TOOL)
tessera_switch(TESSERA_TOOL "Build the command-line tool" ON)
if(TESSERA_COMM_ONLY AND TESSERA_TOOL)
  if(tool_given)
    tessera_refuse("TESSERA_COMM_ONLY leaves out what the tool needs: build without it for TESSERA_TOOL" TESSERA_COMM_ONLY)
  endif()
  set(TESSERA_TOOL OFF)
endif()

set(everything ${PROJECT_IS_TOP_LEVEL})
if(TESSERA_COMM_ONLY)
  set(everything OFF)
endif()
set(tests ${everything})
if(NOT TESSERA_TOOL)
  set(tests OFF)
endif()
tessera_switch(TESSERA_TESTS "Build the tests, which need the tool" ${tests})
tessera_switch(TESSERA_EXAMPLES "Build the examples" ${everything})
tessera_switch(TESSERA_BENCH "Build the micro-benchmarks" ${everything})
tessera_switch(TESSERA_WERROR "Treat warnings as errors: for work on this project, whose presets set it" OFF)
tessera_switch(TESSERA_HARDENING "Build with all checks and protections that distributions use; those without a cost are always on" OFF)
tessera_switch(TESSERA_FUZZ "Build the fuzz targets of tests/fuzz (needs clang)" OFF)
set(TESSERA_DEFAULT_BACKEND "shm" CACHE STRING "The backend where TESSERA_BACKEND is not set")
set(TESSERA_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

if(TESSERA_COMM_ONLY AND (TESSERA_TESTS OR TESSERA_EXAMPLES OR TESSERA_BENCH))
  tessera_refuse("TESSERA_COMM_ONLY leaves out what tests, examples and benchmarks need: build without it for these" TESSERA_COMM_ONLY)
endif()
if(TESSERA_TESTS AND NOT TESSERA_TOOL)
  tessera_refuse("TESSERA_TOOL=OFF leaves out the tool, which the tests run: add TESSERA_TESTS=OFF, or build with the tool" TESSERA_TOOL)
endif()
if(TESSERA_FUZZ AND NOT TESSERA_TESTS)
  tessera_refuse("TESSERA_TESTS=OFF leaves out tests/fuzz, which TESSERA_FUZZ asks for: build with the tests" TESSERA_FUZZ)
endif()
if(NOT TESSERA_SANITIZE MATCHES "^((address|undefined|leak)(,(address|undefined|leak))*|(thread|undefined)(,(thread|undefined))*)?$")
  tessera_refuse("TESSERA_SANITIZE is '${TESSERA_SANITIZE}'; it is address,undefined or thread or empty" TESSERA_SANITIZE)
endif()
