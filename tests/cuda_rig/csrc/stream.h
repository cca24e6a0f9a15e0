// Streams as threads with queues, the moments that events mark, and captures.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cuda_rig {

using Task = std::function<void()>;

int64_t now_ns();

// A point in a stream's work, reached once.
class Moment {
 public:
  void reach();
  void wait() const;
  bool reached() const;
  int64_t ns() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int64_t ns_ = -1;
};

class Stream;

// How far each stream of a capture is known to have come.
using Clock = std::map<const Stream*, uint64_t>;

struct Graph {
  ~Graph();
  std::vector<Task> tasks;
  // What the graph keeps alive, with what ends it.
  std::vector<std::function<void()>> retained;
};

struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  Graph* graph;
  std::vector<Stream*> streams;
  bool invalid = false;
};

// Guards everything of captures.
std::mutex& capture_mutex();

class Stream {
 public:
  Stream(int device, int priority) : device(device), priority(priority) {}

  // Runs `task` after everything before it; keeps it instead where the stream is captured.
  void enqueue(Task task);
  // Runs it in any case.
  void push(Task task);
  void synchronize();
  bool idle();
  // Ends the thread after what is queued, then the stream itself.
  void retire();

  const int device, priority;
  // Under capture_mutex().
  std::shared_ptr<Capture> capture;
  Clock clock;

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  uint64_t pushed_ = 0, done_ = 0;
  bool started_ = false, retired_ = false;
};

struct Event {
  unsigned flags = 0;
  std::mutex mutex;
  std::shared_ptr<Moment> moment;
  std::shared_ptr<Capture> capture;
  Clock clock;
};

Stream* stream_of(cudaStream_t handle);
std::vector<Stream*> streams_of(int device);
void synchronize_device(int device);

// A kernel that runs on a device for as long as this lives.
class Kernel {
 public:
  explicit Kernel(int device);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

 private:
  const int device_;
};
// For how long any kernel has run on a device.
int64_t busy_ns(int device);

// Memory of the device that other processes can map.
struct SharedMemory {
  int process, file;
  uint64_t bytes;
};
// As cudaMalloc(), of whole pages. cudaFree() frees it.
cudaError_t allocate_shared(void** pointer, size_t bytes);
// What `pointer`, the begin of such memory, is; no bytes where it is none.
SharedMemory shared_at(const void* pointer);
// Another process's memory as this one's device sees it, until unmap_shared(); null if it can't.
void* map_shared(const SharedMemory& memory);
void unmap_shared(void* pointer);

int& current_device();
// Keeps the error for cudaGetLastError().
cudaError_t fail(cudaError_t error);
// Whether a call that captures may forbid is allowed; breaks what it may not disturb otherwise.
cudaError_t may_disturb_captures();

}  // namespace cuda_rig
