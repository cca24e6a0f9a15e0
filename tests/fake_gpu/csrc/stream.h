// Streams, their moments, and captures of them: the device's asynchrony, without torch.
//
// A stream is a thread with a queue. What is put on it runs in order, later than the call that put
// it there, and a moment tells when a place in the queue is reached. A stream that is being
// captured runs nothing: what is put on it is kept, in order, and runs when the capture is
// replayed. As with CUDA graphs, a stream that waits for a moment of a captured one joins the
// capture, and must be waited for before the capture ends.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fake_gpu {

constexpr int kDevices = 8;

// CLOCK_MONOTONIC in nanoseconds.
int64_t now_ns();

// Events with timing that were recorded so far, NCCL's own aside.
uint64_t timing_events();

class Stream;
class Capture;

// How many of each stream's captured tasks are ordered before something.
using Clock = std::map<const Stream*, size_t>;

// A place in a stream's queue, once reached for ever reached.
class Moment {
 public:
  void reach(int64_t ns);
  bool reached() const;
  // When it was reached; 0 before.
  int64_t ns() const;
  void wait() const;
  bool wait_for(int64_t limit_ns) const;

  // Set where the moment lies within a capture, and is reached by no live queue.
  std::weak_ptr<Capture> capture;
  bool captured = false;
  Clock clock;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable reached_;
  int64_t ns_ = 0;
};
using MomentPtr = std::shared_ptr<Moment>;

class Capture {
 public:
  using Task = std::function<void()>;

  explicit Capture(const Stream* origin, std::thread::id thread)
      : origin_(origin), thread_(thread) {}

  const Stream* origin() const { return origin_; }
  std::thread::id thread() const { return thread_; }
  size_t size() const;
  // Runs what was captured, in the order in which it was issued.
  void run() const;

 private:
  friend class Stream;
  friend class Streams;

  const Stream* const origin_;
  const std::thread::id thread_;
  mutable std::mutex mutex_;
  std::vector<Task> tasks_;
  std::map<const Stream*, Clock> clocks_;
  Clock issued_;
  std::string broken_;
};

class Stream {
 public:
  using Task = std::function<void()>;

  Stream(int64_t id, int device, bool high_priority);
  int64_t id() const { return id_; }
  int device() const { return device_; }
  bool high_priority() const { return high_priority_; }

  // Puts `task` at the end; the moment is reached when it has run.
  MomentPtr enqueue(Task task);
  // A moment at the end of what was put here so far.
  MomentPtr record() { return enqueue(nullptr); }
  // What is put here from now on runs after `moment`. Throws where a capture forbids it.
  void wait_for(const MomentPtr& moment);
  bool idle() const;
  // Blocks the host. A violation, and throws, on a stream that is being captured.
  void synchronize();
  bool capturing() const;
  std::shared_ptr<Capture> capture() const;

 private:
  friend class Streams;

  struct Entry {
    Task task;
    MomentPtr moment;
  };

  void run();
  MomentPtr keep(const std::shared_ptr<Capture>& capture, Task task);

  const int64_t id_;
  const int device_;
  const bool high_priority_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  MomentPtr last_;
  bool started_ = false;
  std::shared_ptr<Capture> capture_;
};

// The streams of all devices of this process; they are never destroyed, for anything may refer to
// them while the process ends. Current device and streams are the thread's.
class Streams {
 public:
  static Streams& instance();

  Stream& get(int device, int64_t id);
  Stream& current(int device) { return get(device, current_ids()[static_cast<size_t>(device)]); }
  // Returns the id of what was current before.
  int64_t exchange(int device, int64_t id);
  // From a pool, as CUDA's are.
  Stream& from_pool(int device, bool high_priority);
  // One of its own, as those of communicators are.
  Stream& make(int device, bool high_priority);
  std::vector<Stream*> of(int device);
  // Whether all streams of all devices came to rest within the limit.
  bool drain(int64_t limit_ns);

  static int& current_device();

  std::shared_ptr<Capture> begin_capture(Stream& origin);
  // Throws where a stream that joined was not waited for, or a captured stream was misused.
  void end_capture(const std::shared_ptr<Capture>& capture);
  void break_capture(const Capture& capture, const std::string& why);
  // Reports a call that a capture of another thread forbids: CUDA's default mode is global.
  void unsafe_call(const std::string& what);

 private:
  static std::vector<int64_t>& current_ids();

  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_[kDevices];
  std::vector<Stream*> pools_[kDevices][2];
  size_t next_[kDevices][2] = {};
  std::vector<std::shared_ptr<Capture>> captures_;
};

// Within it, this thread's calls don't break captures: cudaThreadExchangeStreamCaptureMode, as
// the watchdogs of NCCL's backends do.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode();
  ~RelaxedCaptureMode();
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;
};

}  // namespace fake_gpu
