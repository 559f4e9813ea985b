// Streams of a device that does not exist: they run nothing until a later event is looked at or waited for, as a GPU
// may be arbitrarily late, so a missing dependency reads stale data.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace fake_cuda {

/// One lock for the whole device.
std::recursive_mutex& device_lock();

class Queue {
 public:
  /// `work` returns false if it can't run yet.
  void push(std::function<bool()> work);
  /// Runs what can run now.
  void advance();
  std::size_t pending();

 private:
  std::deque<std::function<bool()>> queue_;
  bool running_ = false;
};

/// A point in a stream.
struct Point {
  Queue* stream = nullptr;
  std::atomic<bool> reached{false};
  bool look();  ///< advances the stream
};
std::shared_ptr<Point> record(Queue& queue);
void make_wait(Queue& queue, std::shared_ptr<Point> point);

/// Stream 0 is the default one. They live as long as the process.
Queue& stream(int number);
int new_stream();

}  // namespace fake_cuda
