# Writes a table of a glossary as C++: cmake -DOUT=FILE.cpp -DGLOSSARY=docs/glossary.md -P words.cmake
set(heading "## Words of explain and the report\n")
file(READ ${GLOSSARY} text)
string(FIND "${text}" "${heading}" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "${GLOSSARY} has no section of the words of explain and the report")
endif()
string(SUBSTRING "${text}" ${begin} -1 text)
string(REPLACE "${heading}" "" text "${text}")
string(REGEX REPLACE "\n## .*" "" text "${text}")
# A semicolon would separate elements of a list of CMake's.
string(REPLACE ";" "<semicolon>" text "${text}")
if(text MATCHES "[][\\\"]")
  message(FATAL_ERROR "${GLOSSARY}: words.cmake can't read brackets, quotes or backslashes in this table")
endif()
string(REPLACE "\n" ";" lines "${text}")
set(entries "")
set(last "")
foreach(line IN LISTS lines)
  if(NOT line MATCHES "^\\|" OR line MATCHES "^\\| (Word|--) \\|")
    continue()
  endif()
  if(NOT line MATCHES "^\\| ([^|]+) \\| ([^|]+) \\|$")
    message(FATAL_ERROR "${GLOSSARY}: not a word and its meaning: ${line}")
  endif()
  set(word "${CMAKE_MATCH_1}")
  set(meaning "${CMAKE_MATCH_2}")
  if(NOT word STRGREATER last)
    message(FATAL_ERROR "${GLOSSARY}: '${word}' is not in alphabetical order")
  endif()
  set(last "${word}")
  string(APPEND entries "    {\"${word}\", \"${meaning}\"},\n")
endforeach()
string(REPLACE "<semicolon>" ";" entries "${entries}")
file(WRITE ${OUT} "#include \"tools/cli/output.h\"

namespace tessera::tools {

std::span<const Word> words() {
  static constexpr Word kWords[] = {
${entries}  };
  return kWords;
}

}  // namespace tessera::tools
")
