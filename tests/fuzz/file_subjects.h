// Files that others may have made, as inputs of a fuzzer that knows their structure: whole ones, changed at places that
// a source of decisions chooses, with hashes that fit again.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::fuzz {

/// Contents by name.
using Files = std::map<std::string, std::string>;

/// Something that the program reads, and how.
struct Subject {
  std::string name;
  Files files;                                          ///< whole ones
  std::function<void(const std::string& folder)> read;  /// everything in them; throws base::Error if it refuses them
  std::function<void(Files&)> repair = {};              ///< makes hashes fit
};

/// A decision: a number below `choices`, which is above 0.
using Draw = std::function<std::size_t(std::size_t choices)>;

/// Every reader of files.
std::vector<Subject> subjects();

/// Changes the files in one to four places.
Files changed(const Subject& subject, const Draw& draw);

/// "", or the violated property: a reader ends in time and refuses files only by base::Error, whose text is not too
/// long. It takes no memory that the system doesn't have, and a crash ends the program.
std::string broken_property(const Subject& subject, const Files& files);

}  // namespace tessera::fuzz
