#include "tools/report/flight_log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::tools {
namespace {

namespace flight = comm::flight;

constexpr std::size_t kMaxLineBytes = std::size_t{64} << 20;  // of all communicators and failures

constexpr const char* kLogRemedy = "; name a directory that --flight-recorder wrote";

[[noreturn]] void refuse_file(const std::string& path, const std::string& problem) {
  throw base::InvalidUsage("report --postmortem: '" + path + "' " + problem + kLogRemedy);
}

/// Takes the next word of a line; numbers must be whole.
template <class T>
T number_in(std::istringstream& line) {
  std::string word;
  line >> word;
  T value{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || word.empty()) throw std::invalid_argument(word);
  return value;
}

/// A time in nanoseconds: of the steady clock, to which that since 1970 can be added without overflow.
std::int64_t time_of(std::int64_t ns, std::int64_t largest = std::int64_t{1} << 59) {
  if (ns < -largest || ns > largest) throw std::invalid_argument("time");
  return ns;
}

std::string rest_of(std::istringstream& line) {
  std::string text;
  std::getline(line >> std::ws, text);
  return text;
}

std::vector<int> members_of(const std::string& text) {
  std::vector<int> members;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    std::istringstream one(word);
    members.push_back(number_in<int>(one));
  }
  return members;
}

/// At most `bytes` of the file from `begin` on: as many as it has.
std::string read_part(const std::string& path, const base::UniqueFd& file, std::size_t begin, std::size_t bytes) {
  std::string part(bytes, '\0');
  std::size_t read = 0;
  while (read < bytes) {
    const ssize_t count = ::pread(file.get(), part.data() + read, bytes - read, static_cast<off_t>(begin + read));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse_file(path, "can't be read: " + std::generic_category().message(errno));
    if (count == 0) break;
    read += static_cast<std::size_t>(count);
  }
  part.resize(read);
  return part;
}

using Numbers = std::vector<std::uint64_t>;

/// The numbers of the entries. A rank that runs may write an entry at any time: it is whole if its number is the same
/// before and after the entry was read. The fences order the loads of the kernel, which are this thread's.
Numbers read_numbers(const std::string& path, const base::UniqueFd& file) {
  std::atomic_thread_fence(std::memory_order_acquire);
  const std::string entries = read_part(path, file, sizeof(flight::Header), flight::kEntries * sizeof(flight::Entry));
  std::atomic_thread_fence(std::memory_order_acquire);
  Numbers numbers(flight::kEntries);
  for (std::size_t i = 0; (i + 1) * sizeof(flight::Entry) <= entries.size(); ++i)
    std::memcpy(&numbers[i], entries.data() + i * sizeof(flight::Entry), sizeof(numbers[i]));
  return numbers;
}

/// Reads a file's lines, and converts its times from the host's steady clock.
class LogReader {
 public:
  void read_lines(std::string_view text) {
    while (!text.empty()) {
      const std::size_t end = text.find('\n');
      if (end == std::string_view::npos) break;  // the rank died while it wrote the line
      read_line(std::string(text.substr(0, end)));
      text.remove_prefix(end + 1);
    }
    if (log_.groups.empty()) return;  // the rank died before it had joined the others
    if (log_.ranks == 0 || log_.run.empty()) throw std::invalid_argument("lines are missing");
  }
  /// `before`, `after`: the numbers of the entries as they were read before and after `entries`.
  void read_entries(const char* entries, const Numbers& before, const Numbers& after) {
    for (std::uint32_t i = 0; i < flight::kEntries; ++i) {
      flight::Entry entry;
      std::memcpy(&entry, entries + i * sizeof(entry), sizeof(entry));
      const bool whole = entry.number == before[i] && entry.number == after[i];
      if (whole && entry.number != 0) log_.calls.push_back(call_of(entry, i));
    }
    std::ranges::sort(log_.calls, {}, &FlightCall::number);
  }
  FlightLog log() { return std::move(log_); }

 private:
  void read_line(const std::string& text) {
    std::istringstream line(text);
    std::string key, word;
    line >> key;
    for (const auto& [name, value] : {std::pair("run", &log_.run), {"host", &log_.host}, {"backend", &log_.backend}})
      if (key == name) line >> *value;
    if (key == "rank") {
      log_.rank = number_in<int>(line);
      line >> word;
      log_.ranks = number_in<int>(line);
      constexpr int kMost = 1 << 20;
      if (log_.rank < 0 || log_.rank >= log_.ranks || log_.ranks > kMost) throw std::invalid_argument(text);
    } else if (key == "process") {
      log_.process = number_in<int>(line);
    } else if (key == "clock") {
      const std::int64_t steady = time_of(number_in<std::int64_t>(line));
      log_.started_ns = time_of(number_in<std::int64_t>(line), std::int64_t{1} << 61);
      offset_ns_ = log_.started_ns - steady;
    } else if (key == "communicator") {
      const auto number = number_in<std::uint32_t>(line);
      line >> word;
      log_.groups[number] = {word, members_of(rest_of(line))};
    } else if (key == "failure") {
      const std::int64_t at = time_of(number_in<std::int64_t>(line)) + offset_ns_;
      line >> word;
      log_.failures.push_back({at, rest_of(line)});
    } else if (key == "end") {
      line >> word >> word;
      log_.end = word == "closed" ? FlightEnd::closed : FlightEnd::exception;
    }
  }
  FlightCall call_of(const flight::Entry& entry, std::uint32_t place) const {
    const bool known = entry.state >= 1 && entry.state <= flight::kStates && entry.kind < comm::kOpKinds &&
                       entry.dtype < base::kDTypes.size() && entry.reduce < comm::kReduceKinds &&
                       log_.groups.count(entry.communicator) == 1 && (entry.number - 1) % flight::kEntries == place;
    if (!known) throw std::invalid_argument("entry");
    return {.number = entry.number,
            .kind = static_cast<comm::OpKind>(entry.kind),
            .dtype = static_cast<base::DType>(entry.dtype),
            .reduce = static_cast<comm::ReduceOp::Kind>(entry.reduce),
            .communicator = entry.communicator,
            .root = entry.root,
            .sequence = entry.sequence,
            .bytes = entry.bytes,
            .step = entry.step,
            .issued_ns = time_of(entry.issued_ns) + offset_ns_,
            .ended_ns = entry.ended_ns == 0 ? 0 : time_of(entry.ended_ns) + offset_ns_,
            .state = static_cast<flight::State>(entry.state),
            .label = {entry.label.data(), ::strnlen(entry.label.data(), entry.label.size())}};
  }

  FlightLog log_;
  std::int64_t offset_ns_ = 0;
};

bool is_flight_name(const std::filesystem::path& path) {
  return path.extension() == ".flight" && path.stem().string().starts_with("rank-");
}

}  // namespace

FlightLog read_flight_log(const std::string& path) {
  const base::OpenedFile file = base::open_regular(path);
  if (!file.problem.empty()) refuse_file(path, "can't be read: " + file.problem);
  const Numbers before = read_numbers(path, file.fd);
  const std::string head = read_part(path, file.fd, 0, flight::kTextOffset);
  const Numbers after = read_numbers(path, file.fd);
  const std::string_view magic(flight::kMagic.data(), flight::kMagic.size());
  if (!head.starts_with(magic.substr(0, std::min(magic.size(), head.size()))) || head.empty())
    refuse_file(path, "is not a file of the flight recorder, or of another version");
  if (head.size() < flight::kTextOffset)
    refuse_file(path, "was cut: it has " + std::to_string(head.size()) + " bytes, and needs more than " +
                          std::to_string(flight::kTextOffset));
  flight::Header header;
  std::memcpy(&header, head.data(), sizeof(header));
  if (header.entries != flight::kEntries || header.entry_bytes != sizeof(flight::Entry))
    refuse_file(path, "is of another version of the flight recorder");
  try {
    LogReader reader;
    // The lines are read after the entries, which refer to them.
    const auto lines = static_cast<std::size_t>(::lseek(file.fd.get(), 0, SEEK_END)) - flight::kTextOffset;
    if (lines > kMaxLineBytes) refuse_file(path, "has " + std::to_string(lines) + " bytes of text, too many");
    reader.read_lines(read_part(path, file.fd, flight::kTextOffset, lines));
    reader.read_entries(head.data() + sizeof(flight::Header), before, after);
    return reader.log();
  } catch (const base::InvalidUsage&) {
    throw;
  } catch (const std::exception&) {
    refuse_file(path, "is damaged");
  }
}

std::vector<FlightLog> read_flight_logs(const std::string& directory, std::vector<std::string>& ignored) {
  std::error_code error;
  std::vector<std::filesystem::path> paths;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error))
    if (is_flight_name(entry->path())) paths.push_back(entry->path());
  if (error)
    throw base::InvalidUsage("report --postmortem: can't read '" + directory + "': " + error.message() + kLogRemedy);
  if (paths.empty()) refuse_file(directory, "has no file of the flight recorder, rank-R.flight");
  std::vector<FlightLog> logs;
  for (const std::filesystem::path& path : paths) {
    logs.push_back(read_flight_log(path.string()));
    if (logs.back().groups.empty()) {
      logs.pop_back();
      continue;
    }
    if (path.stem() != "rank-" + std::to_string(logs.back().rank))
      refuse_file(path.string(), "is that of rank " + std::to_string(logs.back().rank));
  }
  if (logs.empty()) refuse_file(directory, "holds no calls: every rank ended before all had joined");
  const std::string run = std::ranges::max_element(logs, {}, &FlightLog::started_ns)->run;
  for (const FlightLog& log : logs)
    if (log.run != run) ignored.push_back("rank-" + std::to_string(log.rank) + ".flight");
  std::ranges::sort(ignored);
  std::erase_if(logs, [&](const FlightLog& log) { return log.run != run; });
  std::ranges::sort(logs, {}, &FlightLog::rank);
  return logs;
}

}  // namespace tessera::tools
