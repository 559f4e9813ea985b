#include "tools/launch/rank_output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "tessera/base/error.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {
constexpr std::string_view kOurs = "tessera: ";
constexpr std::size_t kMaxHeld = 1 << 20;

bool is_final_error(std::string_view line) {
  return line.starts_with(kOurs) && !line.starts_with("tessera: note: ") && !line.starts_with("tessera: warning: ");
}
}  // namespace

void read_lines(base::UniqueFd& source, LineSplitter& lines, const std::function<void(std::string_view line)>& line) {
  char bytes[65536];
  const ssize_t got = ::read(source.get(), bytes, sizeof bytes);
  if (got > 0) return lines.feed({bytes, static_cast<std::size_t>(got)}, line);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  lines.finish(line);
  source.reset();
}

void Outlet::write(std::string_view text) {
  if (error_ != 0) return;
  kept_.append(text);
  flush();
}

/// The stream keeps its blocking mode, because other processes share it. A pipe that is ready for writing accepts
/// PIPE_BUF bytes.
void Outlet::flush() {
  while (!empty()) {
    pollfd entry{stream_, POLLOUT, 0};
    if (::poll(&entry, 1, 0) != 1) return;
    const ssize_t count =
        ::write(stream_, kept_.data() + written_, std::min<std::size_t>(kept_.size() - written_, PIPE_BUF));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count < 0) {
      error_ = errno;
      kept_.clear();
      written_ = 0;
      return;
    }
    written_ += static_cast<std::size_t>(count);
    if (written_ < kept_.size() && written_ < kMaxPending) continue;
    kept_.erase(0, written_);
    written_ = 0;
  }
}

RankOutput::RankOutput(const LaunchSpec& plan, int rank, Outlet& output, Outlet& errors)
    : plan_(plan),
      by_prefix_(!plan.prefix.empty()),
      rank_(by_prefix_ ? -1 : plan.global_rank(rank)),
      output_(output),
      errors_(errors) {
  if (plan.log_dir) {
    log_file_ = *plan.log_dir / (by_prefix_ ? "ranks.log" : "rank-" + std::to_string(rank) + ".log");
    base::OpenedFile file = base::open_regular(log_file_, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
    if (!file.fd)
      throw base::InvalidUsage("--log-dir: can't write '" + log_file_ + "': " + file.problem +
                               "; give a writable directory");
    log_ = std::move(file.fd);
  }
  errors_pipe_ = make_pipe();
  ::fcntl(errors_pipe_.read_end.get(), F_SETFL, O_NONBLOCK);
  // Else a rank's terminal stays a terminal.
  if (!plan.tag && !plan.on_output && !plan.log_dir && plan.progress == nullptr && !plan.host) return;
  output_pipe_ = make_pipe();
  ::fcntl(output_pipe_.read_end.get(), F_SETFL, O_NONBLOCK);
}

void RankOutput::on_line(std::string_view line, bool is_error) {
  if (!is_error && plan_.progress != nullptr && line.starts_with(kProgressMark))
    return plan_.progress->show(line.substr(kProgressMark.size()));
  if (log_) log(line);
  if (!is_error) {
    if (plan_.on_output) return plan_.on_output(rank_, line);
    return pass_on(line, false);
  }
  const bool says_something = line.find_first_not_of(" \t-=*#") != std::string_view::npos;
  if (says_something) last_error_line_ = line.substr(0, 2000);
  if (plan_.own_program && by_prefix_ && !line.starts_with(kOurs) && others_.size() < kMaxHeld) {
    others_.append(line).append("\n");
    return;
  }
  if (!plan_.own_program || !is_final_error(line)) return pass_on(line, true);
  const std::string_view error = line.substr(kOurs.size());
  if (held_ && by_prefix_) {
    if (*held_ != error) pass_on(line, true);
    return;
  }
  if (held_) pass_on(std::string(kOurs) + *held_, true);
  held_ = error;
}

/// The first line that can't be written ends the log: a log with gaps would mislead.
void RankOutput::log(std::string_view line) {
  if (write_all(log_.get(), std::string(line) + "\n")) return;
  log_problem_ = "--log-dir: " + std::string(base::system_error("can't write '" + log_file_ + "'").what());
  errors_.write("tessera: warning: " + log_problem_ + "; later output is missing from it\n");
  log_.reset();
}

void RankOutput::pass_on(std::string_view line, bool is_error) const {
  if (plan_.host)  // to the launcher on the other host, which divides the streams
    return output_.write((is_error ? "e " : "o ") + std::to_string(rank_) + " " + std::string(line) + "\n");
  std::string text = plan_.tag && !by_prefix_ ? "[" + std::to_string(rank_) + "] " : "";
  text.append(line).append("\n");
  if (plan_.progress != nullptr) plan_.progress->hide();
  (is_error ? errors_ : output_).write(text);
}

}  // namespace tessera::tools
