# Runs PROGRAM on RANKS ranks and compares what it prints with the file EXPECTED.
execute_process(COMMAND ${TOOL} run -n ${RANKS} --no-tag -- ${PROGRAM} OUTPUT_VARIABLE printed RESULT_VARIABLE code)
file(READ ${EXPECTED} expected)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "ended with ${code}")
endif()
if(NOT printed STREQUAL expected)
  message(FATAL_ERROR "printed:\n${printed}\nexpected:\n${expected}")
endif()
