#include "streams.h"

namespace fake_cuda {

std::recursive_mutex& device_lock() {
  static auto* const lock = new std::recursive_mutex;
  return *lock;
}

void Queue::push(std::function<bool()> work) {
  const std::lock_guard lock(device_lock());
  queue_.push_back(std::move(work));
}

void Queue::advance() {
  const std::lock_guard lock(device_lock());
  if (running_) return;  // streams that wait for each other
  running_ = true;
  while (!queue_.empty() && queue_.front()()) {
    const auto done = std::move(queue_.front());
    queue_.pop_front();  // what `done` frees may append to this stream
  }
  running_ = false;
}

std::size_t Queue::pending() {
  const std::lock_guard lock(device_lock());
  return queue_.size();
}

bool Point::look() {
  if (!reached.load()) stream->advance();
  return reached.load();
}

std::shared_ptr<Point> record(Queue& queue) {
  auto point = std::make_shared<Point>();
  point->stream = &queue;
  queue.push([point] {
    point->reached.store(true);
    return true;
  });
  return point;
}

void make_wait(Queue& queue, std::shared_ptr<Point> point) {
  queue.push([point = std::move(point)] { return point->look(); });
}

namespace {

std::deque<Queue>& streams() {
  static auto* const all = new std::deque<Queue>(1);
  return *all;
}

}  // namespace

Queue& stream(int number) {
  const std::lock_guard lock(device_lock());
  return streams().at(static_cast<std::size_t>(number));
}

int new_stream() {
  const std::lock_guard lock(device_lock());
  streams().emplace_back();
  return static_cast<int>(streams().size()) - 1;
}

}  // namespace fake_cuda
