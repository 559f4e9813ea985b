// The options of the batch: the data, and how an optimizer step divides them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// As given on the command line; see the help texts in batch_options.cpp.
struct BatchOptions {
  std::vector<std::string> data;
  std::string data_format = "bytes";
  std::int64_t global_batch = 12;
  bool batch_given = false;
  std::optional<std::int64_t> seq_len;
  std::int64_t accumulate = 1;
  std::string reduce_when;  ///< empty: every microbatch
};

void add_data_options(CLI::App& command, BatchOptions& o);
void add_batch_options(CLI::App& command, BatchOptions& o);         ///< its size
void add_accumulation_options(CLI::App& command, BatchOptions& o);  ///< its microbatches

}  // namespace tessera::tools
