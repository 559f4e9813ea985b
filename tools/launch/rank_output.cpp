#include "tools/launch/rank_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {
constexpr std::string_view kOurs = "tessera: ";
constexpr std::size_t kMaxHeld = 1 << 20;

bool is_final_error(std::string_view line) {
  return line.starts_with(kOurs) && !line.starts_with("tessera: note: ") && !line.starts_with("tessera: warning: ");
}
}  // namespace

RankOutput::RankOutput(RankOutputPlan plan) : plan_(std::move(plan)) {
  if (!plan_.log_file.empty()) {
    base::OpenedFile file = base::open_regular(plan_.log_file, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
    if (!file.fd)
      throw base::InvalidUsage("--log-dir: can't write '" + plan_.log_file + "': " + file.problem +
                               "; give a writable directory");
    log_ = std::move(file.fd);
  }
  errors_pipe_ = make_pipe();
  ::fcntl(errors_pipe_.read_end.get(), F_SETFL, O_NONBLOCK);
  if (!plan_.capture) return;
  output_pipe_ = make_pipe();
  ::fcntl(output_pipe_.read_end.get(), F_SETFL, O_NONBLOCK);
}

void RankOutput::detach() {
  output_pipe_.write_end.reset();
  errors_pipe_.write_end.reset();
}

bool RankOutput::read(base::UniqueFd& source, LineSplitter& lines, bool is_error) {
  const auto on_each = [&](std::string_view line) { on_line(line, is_error); };
  char bytes[65536];
  const ssize_t got = ::read(source.get(), bytes, sizeof bytes);
  if (got > 0) {
    lines.feed({bytes, static_cast<std::size_t>(got)}, on_each);
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  lines.finish(on_each);
  source.reset();
  return false;
}

void RankOutput::on_line(std::string_view line, bool is_error) {
  if (!is_error && plan_.progress != nullptr && line.starts_with(kProgressMark))
    return plan_.progress->show(line.substr(kProgressMark.size()));
  if (log_) log(line);
  if (!is_error) {
    if (plan_.on_output) return plan_.on_output(plan_.rank, line);
    return pass_on(line, false);
  }
  const bool says_something = line.find_first_not_of(" \t-=*#") != std::string_view::npos;
  if (says_something) last_error_line_ = line.substr(0, 2000);
  if (plan_.hold_errors && plan_.hold_first && !line.starts_with(kOurs) && others_.size() < kMaxHeld) {
    others_.append(line).append("\n");
    return;
  }
  if (!plan_.hold_errors || !is_final_error(line)) return pass_on(line, true);
  const std::string_view error = line.substr(kOurs.size());
  if (held_ && plan_.hold_first) {
    if (*held_ != error) pass_on(line, true);
    return;
  }
  if (held_) pass_on(std::string(kOurs) + *held_, true);
  held_ = error;
}

/// The first line that can't be written ends the log: a log with gaps would mislead.
void RankOutput::log(std::string_view line) {
  std::string text(line);
  text += '\n';
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t count = ::write(log_.get(), rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      log_problem_ = "--log-dir: " + std::string(base::system_error("can't write '" + plan_.log_file + "'").what());
      plan_.errors->write("tessera: warning: " + log_problem_ + "; later output is missing from it\n");
      return log_.reset();
    }
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
}

void RankOutput::pass_on(std::string_view line, bool is_error) const {
  std::string text = plan_.tag ? "[" + std::to_string(plan_.rank) + "] " : "";
  text.append(line).append("\n");
  if (plan_.progress != nullptr) plan_.progress->hide();
  (is_error ? plan_.errors : plan_.output)->write(text);
}

std::optional<std::string> RankOutput::release_error() { return std::exchange(held_, std::nullopt); }

}  // namespace tessera::tools
