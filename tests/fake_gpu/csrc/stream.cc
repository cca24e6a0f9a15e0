#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "controls.h"
#include "violations.h"

namespace fake_gpu {
namespace {

constexpr size_t kPoolSize = 8;

thread_local int relaxed = 0;

size_t index_of(int device) {
  if (device < 0 || device >= kDevices) throw std::out_of_range("fakegpu: no such device");
  return static_cast<size_t>(device);
}

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Moment::reach(int64_t ns) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ns_ = ns;
  }
  reached_.notify_all();
}

bool Moment::reached() const { return ns() != 0; }

int64_t Moment::ns() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ns_;
}

void Moment::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  reached_.wait(lock, [this] { return ns_ != 0; });
}

bool Moment::wait_for(int64_t limit_ns) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return reached_.wait_for(lock, std::chrono::nanoseconds(limit_ns), [this] { return ns_ != 0; });
}

size_t Capture::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.size();
}

void Capture::run() const {
  std::vector<Task> tasks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks = tasks_;
  }
  for (const Task& task : tasks) task();
}

Stream::Stream(int64_t id, int device, bool high_priority)
    : id_(id), device_(device), high_priority_(high_priority) {}

std::shared_ptr<Capture> Stream::capture() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capture_;
}

bool Stream::capturing() const { return capture() != nullptr; }

MomentPtr Stream::keep(const std::shared_ptr<Capture>& capture, Task task) {
  auto moment = std::make_shared<Moment>();
  moment->captured = true;
  moment->capture = capture;
  const std::lock_guard<std::mutex> lock(capture->mutex_);
  Clock& clock = capture->clocks_[this];
  if (task) {
    capture->tasks_.push_back(std::move(task));
    clock[this] = ++capture->issued_[this];
  }
  moment->clock = clock;
  return moment;
}

MomentPtr Stream::enqueue(Task task) {
  if (const auto capture = this->capture()) {
    return keep(capture, std::move(task));
  }
  auto moment = std::make_shared<Moment>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!task && (!last_ || last_->reached())) {
      moment->reach(now_ns());
      return moment;
    }
    queue_.push_back({std::move(task), moment});
    last_ = moment;
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
  }
  changed_.notify_all();
  return moment;
}

void Stream::wait_for(const MomentPtr& moment) {
  const auto own = capture();
  if (!moment->captured) {
    if (own) {
      const std::string why = "a captured stream waits for work outside of the capture";
      Violations::instance().add("capture_isolation", why);
      Streams::instance().break_capture(*own, why);
      throw std::runtime_error("fakegpu: " + why);
    }
    if (moment->reached()) return;
    enqueue([moment] { moment->wait(); });
    return;
  }
  const auto other = moment->capture.lock();
  if (!other || (own && own != other)) {
    throw std::runtime_error("fakegpu: a stream waits for an event of a capture that has ended");
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    capture_ = other;
  }
  const std::lock_guard<std::mutex> lock(other->mutex_);
  Clock& clock = other->clocks_[this];
  for (const auto& [stream, count] : moment->clock) {
    size_t& known = clock[stream];
    known = std::max(known, count);
  }
}

bool Stream::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !last_ || last_->reached();
}

void Stream::synchronize() {
  if (const auto own = capture()) {
    const std::string why = "the host waits for a stream that is being captured";
    Violations::instance().add("capture_unsafe_call", why);
    Streams::instance().break_capture(*own, why);
    throw std::runtime_error("fakegpu: " + why);
  }
  MomentPtr last;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last = last_;
  }
  if (last) last->wait();
}

void Stream::run() {
  while (true) {
    Entry entry;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      entry = std::move(queue_.front());
      queue_.pop_front();
    }
    try {
      if (entry.task) entry.task();
    } catch (const std::exception& error) {
      Violations::instance().add("device_error", error.what());
    }
    // What the task holds goes before anyone who waits for it goes on.
    entry.task = nullptr;
    entry.moment->reach(now_ns());
  }
}

Streams& Streams::instance() {
  static auto* const streams = new Streams;
  return *streams;
}

Stream& Streams::make(int device, bool high_priority) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& list = streams_[index_of(device)];
  if (list.empty()) list.push_back(std::make_unique<Stream>(0, device, false));
  list.push_back(
      std::make_unique<Stream>(static_cast<int64_t>(list.size()), device, high_priority));
  return *list.back();
}

Stream& Streams::get(int device, int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& list = streams_[index_of(device)];
  if (list.empty()) list.push_back(std::make_unique<Stream>(0, device, false));
  return *list.at(static_cast<size_t>(id));
}

Stream& Streams::from_pool(int device, bool high_priority) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& pool = pools_[index_of(device)][high_priority];
    if (pool.size() == kPoolSize) return *pool[next_[device][high_priority]++ % kPoolSize];
  }
  Stream& made = make(device, high_priority);
  const std::lock_guard<std::mutex> lock(mutex_);
  pools_[device][high_priority].push_back(&made);
  return made;
}

std::vector<int64_t>& Streams::current_ids() {
  thread_local std::vector<int64_t> ids(kDevices, 0);
  return ids;
}

int& Streams::current_device() {
  thread_local int device = 0;
  return device;
}

int64_t Streams::exchange(int device, int64_t id) {
  get(device, id);
  return std::exchange(current_ids()[static_cast<size_t>(device)], id);
}

std::vector<Stream*> Streams::of(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Stream*> found;
  for (const auto& stream : streams_[index_of(device)]) found.push_back(stream.get());
  return found;
}

bool Streams::drain(int64_t limit_ns) {
  const int64_t end = now_ns() + limit_ns;
  for (int device = 0; device < kDevices; ++device) {
    for (Stream* stream : of(device)) {
      while (!stream->idle()) {
        if (now_ns() > end) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
  return true;
}

std::shared_ptr<Capture> Streams::begin_capture(Stream& origin) {
  if (origin.capturing()) throw std::runtime_error("fakegpu: the stream is being captured already");
  auto capture = std::make_shared<Capture>(&origin, std::this_thread::get_id());
  {
    const std::lock_guard<std::mutex> lock(origin.mutex_);
    origin.capture_ = capture;
  }
  capture->clocks_[&origin];
  const std::lock_guard<std::mutex> lock(mutex_);
  captures_.push_back(capture);
  return capture;
}

void Streams::end_capture(const std::shared_ptr<Capture>& capture) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    captures_.erase(std::remove(captures_.begin(), captures_.end(), capture), captures_.end());
  }
  for (int device = 0; device < kDevices; ++device) {
    for (Stream* stream : of(device)) {
      const std::lock_guard<std::mutex> lock(stream->mutex_);
      if (stream->capture_ == capture) stream->capture_.reset();
    }
  }
  const std::lock_guard<std::mutex> lock(capture->mutex_);
  if (!capture->broken_.empty()) {
    throw std::runtime_error("fakegpu: the capture is invalid: " + capture->broken_);
  }
  const Clock& seen = capture->clocks_[capture->origin_];
  for (const auto& [stream, count] : capture->issued_) {
    const auto found = seen.find(stream);
    if (found == seen.end() || found->second < count) {
      throw std::runtime_error("fakegpu: stream " + std::to_string(stream->id()) +
                               " joined the capture and was not waited for");
    }
  }
}

void Streams::break_capture(const Capture& capture, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& running : captures_) {
    if (running.get() != &capture) continue;
    const std::lock_guard<std::mutex> inner(running->mutex_);
    running->broken_ = why;
  }
}

void Streams::unsafe_call(const std::string& what) {
  if (relaxed > 0) return;
  bool broken = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& running : captures_) {
      const std::lock_guard<std::mutex> inner(running->mutex_);
      running->broken_ = what + " while a stream is being captured";
      broken = true;
    }
  }
  if (!broken) return;
  Violations::instance().add("capture_unsafe_call", what + " while a stream is being captured");
  throw std::runtime_error("fakegpu: " + what + " is not permitted when a stream is capturing");
}

RelaxedCaptureMode::RelaxedCaptureMode() { ++relaxed; }
RelaxedCaptureMode::~RelaxedCaptureMode() { --relaxed; }

}  // namespace fake_gpu

// For libraries that would call cudaThreadExchangeStreamCaptureMode on a GPU.
extern "C" __attribute__((visibility("default"))) int fake_gpu_exchange_capture_mode(int* mode) {
  const int before = fake_gpu::relaxed;
  fake_gpu::relaxed = *mode;
  *mode = before;
  return 0;
}
