#include "tessera/comm/control/watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <list>
#include <set>
#include <thread>

namespace tessera::comm {

namespace asio = boost::asio;

class Watch::Impl {
 public:
  Impl(const std::vector<Lifeline>& lifelines, std::function<void(int)> lost) : lost_(std::move(lost)) {
    for (const Lifeline& line : lifelines) {
      if (line.connection >= 0) watch_connection(line.rank, ::dup(line.connection));
      // A descriptor of the process itself is readable when it ends, however it ends. Old kernels have none: then the
      // connection to or from rank 0 must do.
      if (line.pid > 0) watch_process(line.rank, static_cast<int>(::syscall(SYS_pidfd_open, line.pid, 0)));
    }
    thread_ = std::thread([this] { context_.run(); });
  }

  ~Impl() {
    context_.stop();
    thread_.join();
  }

 private:
  void watch_connection(int rank, int fd) {
    if (fd < 0) return;
    auto& stream = streams_.emplace_back(context_, fd);
    read_more(rank, stream);
  }

  /// Nothing is sent after the start: whatever ends the read is the end of the rank.
  void read_more(int rank, asio::posix::stream_descriptor& stream) {
    stream.async_read_some(asio::buffer(ignored_),
                           [this, rank, &stream](const boost::system::error_code& error, std::size_t) {
                             if (error == asio::error::operation_aborted) return;
                             if (error) return tell(rank);
                             read_more(rank, stream);
                           });
  }

  void watch_process(int rank, int fd) {
    if (fd < 0) return;
    auto& stream = streams_.emplace_back(context_, fd);
    stream.async_wait(asio::posix::stream_descriptor::wait_read, [this, rank](const boost::system::error_code& error) {
      if (!error) tell(rank);
    });
  }

  void tell(int rank) {
    if (told_.insert(rank).second) lost_(rank);
  }

  const std::function<void(int)> lost_;
  asio::io_context context_{1};
  asio::executor_work_guard<asio::io_context::executor_type> guard_{context_.get_executor()};
  std::list<asio::posix::stream_descriptor> streams_;
  std::array<char, 256> ignored_{};
  std::set<int> told_;
  std::thread thread_;
};

Watch::Watch(const std::vector<Lifeline>& lifelines, std::function<void(int)> lost)
    : impl_(std::make_unique<Impl>(lifelines, std::move(lost))) {}
Watch::~Watch() = default;

}  // namespace tessera::comm
