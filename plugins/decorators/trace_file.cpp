// Sinks for trace events.
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <utility>
#include <vector>

#include "plugins/decorators/trace.h"
#include "tessera/base/process.h"

namespace tessera::decorators {
namespace {

std::string title(const OperationEvent& event) {
  return event.label.empty() ? event.operation : event.operation + " " + event.label;
}

double microseconds(std::int64_t ns) { return static_cast<double>(ns) / 1000.0; }

/// Collects events until its destruction, then writes the file.
class TraceFile {
 public:
  TraceFile(std::string path, std::shared_ptr<Logger> logger) : path_(std::move(path)), logger_(std::move(logger)) {}
  ~TraceFile() {
    if (made_in_ != base::forks_so_far()) return;  // the file is the parent's
    try {
      std::ofstream out(path_);
      write_chrome_trace(out, events_);
      out.close();
      if (!out) warn("can't write it");
    } catch (const std::exception& error) {
      warn(error.what());
    }
  }
  void add(const OperationEvent& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
  }

 private:
  void warn(const std::string& why) const noexcept {
    if (logger_ != nullptr) logger_->write(LogLevel::warn, "trace: " + path_ + ": " + why);
  }
  const std::uint32_t made_in_ = base::count_forks();
  const std::string path_;
  const std::shared_ptr<Logger> logger_;
  std::mutex mutex_;
  std::vector<OperationEvent> events_;
};

}  // namespace

TraceSink trace_to_log(std::shared_ptr<Logger> logger) {
  return [logger = std::move(logger)](const OperationEvent& event) {
    if (logger == nullptr || !logger->enabled(LogLevel::info)) return;
    std::string text = "trace: " + event.operation + " #" + std::to_string(event.number);
    if (!event.label.empty()) text += " (" + event.label + ")";
    text +=
        " " + std::to_string(event.bytes) + " bytes " + std::to_string((event.end_ns - event.start_ns) / 1000) + "us";
    if (event.handed_over) text += ", awaited by a stream";
    if (!event.error.empty()) text += ", failed: " + event.error;
    logger->write(LogLevel::info, text);
  };
}

TraceSink trace_to_file(std::string path, std::shared_ptr<Logger> logger) {
  return [file = std::make_shared<TraceFile>(std::move(path), std::move(logger))](const OperationEvent& event) {
    file->add(event);
  };
}

void write_chrome_trace(std::ostream& out, std::span<const OperationEvent> events) {
  using nlohmann::json;
  json trace = json::array();
  std::set<std::pair<int, int>> named;
  for (const OperationEvent& event : events) {
    const int track = event.communicator;
    if (named.insert({event.rank, -1}).second)
      trace.push_back({{"ph", "M"},
                       {"name", "process_name"},
                       {"pid", event.rank},
                       {"args", {{"name", "rank " + std::to_string(event.rank)}}}});
    if (named.insert({event.rank, track}).second)
      trace.push_back({{"ph", "M"},
                       {"name", "thread_name"},
                       {"pid", event.rank},
                       {"tid", track},
                       {"args", {{"name", "communicator " + std::to_string(track)}}}});
    // Operations overlap each other, so they are asynchronous events: a begin and an end with one id.
    json begin = {{"name", title(event)},
                  {"cat", event.operation},
                  {"ph", "b"},
                  {"id", event.number},
                  {"pid", event.rank},
                  {"tid", track},
                  {"ts", microseconds(event.start_ns)},
                  {"args", {{"number", event.number}, {"bytes", event.bytes}, {"label", event.label}}}};
    if (!event.error.empty()) begin["args"]["error"] = event.error;
    if (event.handed_over) begin["args"]["handed_over"] = true;
    json end = begin;
    end.erase("args");
    end["ph"] = "e";
    end["ts"] = microseconds(event.end_ns);
    trace.push_back(std::move(begin));
    trace.push_back(std::move(end));
  }
  const json document = {{"traceEvents", std::move(trace)}, {"displayTimeUnit", "ms"}};
  out << document.dump(-1, ' ', false, json::error_handler_t::replace) << "\n";  // a label may hold any bytes
}

}  // namespace tessera::decorators
