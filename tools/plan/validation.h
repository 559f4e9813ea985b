// plan --validate: predicts steps that others measured, and says how far it is off.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/plan/calibration.h"
#include "tools/plan/published_rows.h"

namespace tessera::tools {

/// A row beside its prediction.
struct ValidatedRow {
  std::string id, source, cluster, reach;
  std::string metric;  ///< the row's key: "tokens_per_s_per_gpu"
  bool calibration = false;
  std::string outlier;                 ///< why the row looks anomalous; empty: it doesn't
  double measured = 0, predicted = 0;  ///< in the units of the metric
  double step_error = 0;               ///< predicted / measured - 1 of the step's time
  std::string cause;                   ///< the likely one of an error above 10 %; empty: the error is smaller
  std::optional<double> measured_gib;  ///< memory
  double predicted_gib = 0;            ///< peak of the engine

  double error() const;  ///< |predicted / measured - 1| of the metric
};

/// A machine with one generation of software.
struct ValidatedMachine {
  std::string source, cluster;
  std::vector<std::string> calibrated_by;  ///< ids of rows
  Calibration calibration;
};

struct Validation {
  std::vector<ValidatedRow> rows;
  std::vector<ValidatedMachine> machines;
  std::vector<std::pair<std::string, std::string>> out_of_reach;  ///< id and reason
};

Validation validate_rows(const std::vector<PublishedRow>& rows);

/// Errors of some rows, as parts of 1.
struct ErrorSummary {
  std::size_t rows = 0;
  double mean = 0, median = 0, p90 = 0, max = 0, bias = 0;
};
/// Of the predicted rows of a source ("": all) with this reach that are no outliers. A row that doesn't state its reach
/// counts as "yes".
ErrorSummary errors_of(const Validation& validation, const std::string& source, const std::string& reach);

std::string to_text(const Validation& validation);
nlohmann::ordered_json to_json(const Validation& validation);

}  // namespace tessera::tools
