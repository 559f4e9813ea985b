#include "tools/train/csv_log.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <optional>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

constexpr std::string_view kHeader =
    "step,loss,tokens_per_second,grad_norm,learning_rate,loss_scale,skipped_steps,live_bytes,peak_bytes,mfu\r\n";

template <class T>
std::string field(const std::optional<T>& value) {
  return value ? fmt::format("{}", *value) : "";
}

/// The step of a record; nothing if the line isn't one.
std::optional<std::int64_t> step_of(std::string_view line) {
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
  if (error != std::errc() || end == line.data() + line.size() || *end != ',') return std::nullopt;
  return step;
}

/// What remains of a log if `first_step` steps count. The last line may be incomplete, since a run may die at any time.
std::string kept_records(const std::string& path, std::string_view text, std::int64_t first_step) {
  if (!text.empty() && !text.starts_with(kHeader))
    throw base::InvalidUsage("--log-csv '" + path +
                             "' does not begin with the header of this log, so a resumed run can't continue it; name "
                             "another file, or remove this one");
  std::string kept(kHeader);
  std::int64_t last = 0;
  for (std::size_t begin = kHeader.size(), number = 2; begin < text.size(); ++number) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) break;
    const std::string_view line = text.substr(begin, end + 1 - begin);
    const auto step = step_of(line);
    if (!step || *step <= last)
      throw base::InvalidUsage(fmt::format(
          "--log-csv '{}': line {} is not the record of a step after {}, so a resumed run can't continue the file; "
          "name another file, or remove this one",
          path, number, last));
    last = *step;
    if (last > first_step) break;
    kept += line;
    begin = end + 1;
  }
  return kept;
}

/// The text of a log that the run continues; nothing if it starts a new one.
std::optional<std::string> text_to_continue(const std::string& path, std::int64_t first_step) {
  std::error_code error;
  if (path.empty() || first_step == 0 || !std::filesystem::is_regular_file(path, error)) return std::nullopt;
  const base::FileText read = base::read_regular(path);
  if (!read.problem.empty()) throw base::InvalidUsage("--log-csv: can't read '" + path + "': " + read.problem);
  return read.text;
}

LineFile open_log(const std::string& path, std::int64_t first_step) {
  const auto text = text_to_continue(path, first_step);
  if (!text) {
    LineFile file("--log-csv", path);
    file.write(kHeader);
    return file;
  }
  if (const std::string kept = kept_records(path, *text, first_step); kept != *text) write_file(path, kept);
  return {"--log-csv", path, LineFile::Mode::append};
}

}  // namespace

void check_csv_log(const std::string& path, std::int64_t first_step) {
  if (const auto text = text_to_continue(path, first_step)) kept_records(path, *text, first_step);
}

CsvLog::CsvLog(const std::string& path, std::int64_t first_step) : file_(open_log(path, first_step)) {}

void CsvLog::write(const StepReport& step) {
  const auto skipped = step.loss_scale ? std::optional(step.skipped_steps) : std::nullopt;
  file_.write(fmt::format("{},{},{},{},{},{},{},{},{},{}\r\n", step.step, step.loss, step.tokens_per_second,
                          step.grad_norm, step.learning_rate, field(step.loss_scale), field(skipped), step.live_bytes,
                          step.peak_bytes, field(step.mfu)));
}

}  // namespace tessera::tools
