// --log-csv: a table of the steps of a training, which spreadsheets and pandas read.
#pragma once

#include <cstdint>
#include <string>

#include "tools/cli/line_file.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

/// RFC 4180: a header, then a record for each step, written when the step is done. A run that resumes continues its
/// file; the records of steps that it will do again are dropped.
class CsvLog {
 public:
  /// `first_step`: number of steps that the run has done before. "" is no file. Throws InvalidUsage.
  CsvLog(const std::string& path, std::int64_t first_step);
  void write(const StepReport& step);

 private:
  LineFile file_;
};

/// Throws InvalidUsage if a run that resumes after `first_step` steps can't continue the file: another program, or
/// another version, has written it.
void check_csv_log(const std::string& path, std::int64_t first_step);

}  // namespace tessera::tools
