#include "stream.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <set>
#include <thread>

#include "controls.h"

namespace cuda_rig {
namespace {

// Streams outlive static destructors: their threads may still be at work when the process ends.
struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
  std::map<int, Stream*> defaults;
  std::vector<std::shared_ptr<Capture>> captures;
  std::mutex captures_mutex;
};

Streams& streams() {
  static auto* const made = new Streams;
  return *made;
}

// Kernels that run on each device now, since when, and for how long others ran before.
struct Load {
  int running = 0;
  int64_t since_ns = 0, before_ns = 0;
};
struct Loads {
  std::mutex mutex;
  std::map<int, Load> of;
};

Loads& loads() {
  static auto* const made = new Loads;
  return *made;
}

// Between two looks of a stream that waits for a word.
constexpr auto kLookAtWord = std::chrono::microseconds(20);
constexpr int CUDA_ERROR_NOT_SUPPORTED = 801;

std::atomic<uint32_t>& word_at(uint64_t address) {
  return *reinterpret_cast<std::atomic<uint32_t>*>(address);
}

std::atomic<bool> ending{false};
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

void invalidate(const Capture& of) {
  for (auto& capture : streams().captures) {
    if (capture->id == of.id) capture->invalid = true;
  }
}

}  // namespace

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void Moment::reach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ns_ = now_ns();
  changed_.notify_all();
}

void Moment::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return ns_ >= 0; });
}

bool Moment::reached() const { return ns() >= 0; }

int64_t Moment::ns() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ns_;
}

Graph::~Graph() {
  for (auto& end : retained) end();
}

std::mutex& capture_mutex() { return streams().captures_mutex; }

void Stream::enqueue(Task task) {
  {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    if (capture) {
      capture->graph->tasks.push_back(std::move(task));
      ++clock[this];
      return;
    }
  }
  push(std::move(task));
}

void Stream::push(Task task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    static const int registered = std::atexit([] { ending = true; });
    static_cast<void>(registered);
    std::thread([this] { run(); }).detach();
  }
  queue_.push_back(std::move(task));
  ++pushed_;
  changed_.notify_all();
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return retired_ || !queue_.empty(); });
    if (queue_.empty()) break;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (!ending) task();
    task = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
  lock.unlock();
  delete this;
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t wanted = pushed_;
  changed_.wait(lock, [&] { return done_ >= wanted; });
}

bool Stream::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

void Stream::retire() {
  std::unique_lock<std::mutex> lock(mutex_);
  retired_ = true;
  if (!started_) {
    lock.unlock();
    delete this;
    return;
  }
  changed_.notify_all();
}

Stream* stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) {
    return reinterpret_cast<Stream*>(handle);
  }
  const std::lock_guard<std::mutex> lock(streams().mutex);
  Stream*& found = streams().defaults[current_device()];
  if (found == nullptr) {
    found = new Stream(current_device(), 0);
    streams().all.insert(found);
  }
  return found;
}

// The caller holds what keeps streams from ending: as in CUDA, nobody destroys one that is in use.
std::vector<Stream*> streams_of(int device) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  std::vector<Stream*> found;
  for (Stream* stream : streams().all) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

void synchronize_device(int device) {
  for (Stream* stream : streams_of(device)) stream->synchronize();
}

Kernel::Kernel(int device) : device_(device) {
  const std::lock_guard<std::mutex> lock(loads().mutex);
  Load& load = loads().of[device_];
  if (load.running++ == 0) load.since_ns = now_ns();
}

Kernel::~Kernel() {
  const std::lock_guard<std::mutex> lock(loads().mutex);
  Load& load = loads().of[device_];
  if (--load.running == 0) load.before_ns += now_ns() - load.since_ns;
}

int64_t busy_ns(int device) {
  const std::lock_guard<std::mutex> lock(loads().mutex);
  const Load& load = loads().of[device];
  return load.before_ns + (load.running > 0 ? now_ns() - load.since_ns : 0);
}

int& current_device() {
  static thread_local int device = 0;
  return device;
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t may_disturb_captures() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(capture_mutex());
  cudaError_t found = cudaSuccess;
  for (const auto& capture : streams().captures) {
    const bool own = capture->thread == std::this_thread::get_id() &&
                     capture->mode != cudaStreamCaptureModeRelaxed;
    const bool global =
        thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (!own && !global) continue;
    capture->invalid = true;
    found = cudaErrorStreamCaptureUnsupported;
  }
  return fail(found);
}

}  // namespace cuda_rig

using namespace cuda_rig;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t found = last_error;
  last_error = cudaSuccess;
  return found;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

// Streams.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  auto* const made = new Stream(current_device(), priority);
  const std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Stream* const found = stream_of(stream);
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(found);
  }
  found->retire();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count_call("cudaStreamSynchronize");
  if (const cudaError_t error = may_disturb_captures()) return error;
  stream_of(stream)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t error = may_disturb_captures()) return error;
  return stream_of(stream)->idle() ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaDeviceSynchronize() {
  count_call("cudaDeviceSynchronize");
  if (const cudaError_t error = may_disturb_captures()) return error;
  synchronize_device(current_device());
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  stream_of(stream)->enqueue([=] { function(data); });
  return cudaSuccess;
}
// The driver's, with its types as numbers.
int cuStreamWriteValue32_v2(cudaStream_t stream, uint64_t address, uint32_t value, unsigned) {
  count_call("cuStreamWriteValue32");
  if (take_fault("write_value", false).kind == "refuse") return CUDA_ERROR_NOT_SUPPORTED;
  stream_of(stream)->enqueue([=] { word_at(address).store(value); });
  return 0;
}
int cuStreamWaitValue32_v2(cudaStream_t stream, uint64_t address, uint32_t value, unsigned flags) {
  count_call("cuStreamWaitValue32");
  if (take_fault("wait_value", false).kind == "refuse") return CUDA_ERROR_NOT_SUPPORTED;
  if (flags != 0) return CUDA_ERROR_NOT_SUPPORTED;  // only "at least"
  stream_of(stream)->enqueue([=] {
    while (static_cast<int32_t>(word_at(address).load() - value) < 0 && !ending) {
      std::this_thread::sleep_for(kLookAtWord);
    }
  });
  return 0;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  stream_of(stream)->enqueue([=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

// Events. A handle is a pointer to what is shared with the streams.

using Shared = std::shared_ptr<Event>;
static Shared event_of(cudaEvent_t handle) { return *reinterpret_cast<Shared*>(handle); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  auto made = std::make_shared<Event>();
  made->flags = flags;
  if (!(flags & cudaEventDisableTiming)) count_call("timing events");
  *event = reinterpret_cast<cudaEvent_t>(new Shared(std::move(made)));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Shared*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
  const Shared event = event_of(handle);
  Stream* const stream = stream_of(on);
  {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    if (stream->capture && !(flags & cudaEventRecordExternal)) {
      const std::lock_guard<std::mutex> also(event->mutex);
      event->moment = nullptr;
      event->capture = stream->capture;
      event->clock = stream->clock;
      return cudaSuccess;
    }
  }
  const auto record = [event] {
    auto moment = std::make_shared<Moment>();
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->moment = moment;
    event->capture = nullptr;
    return moment;
  };
  if (flags & cudaEventRecordExternal) {
    stream->enqueue([record] { record()->reach(); });
  } else {
    stream->push([moment = record()] { moment->reach(); });
  }
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

static std::shared_ptr<Moment> moment_of(const Shared& event, bool& captured) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  captured = event->capture != nullptr;
  return event->moment;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  count_call("cudaEventQuery");
  if (const cudaError_t error = may_disturb_captures()) return error;
  bool captured = false;
  const auto moment = moment_of(event_of(handle), captured);
  if (captured) return fail(cudaErrorCapturedEvent);
  return !moment || moment->reached() ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  count_call("cudaEventSynchronize");
  if (const cudaError_t error = may_disturb_captures()) return error;
  bool captured = false;
  const auto moment = moment_of(event_of(handle), captured);
  if (captured) return fail(cudaErrorCapturedEvent);
  if (moment) moment->wait();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t handle, unsigned flags) {
  count_call("cudaStreamWaitEvent");
  const Shared event = event_of(handle);
  Stream* const stream = stream_of(on);
  std::shared_ptr<Moment> moment;
  {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    const std::lock_guard<std::mutex> also(event->mutex);
    moment = event->moment;
    if (event->capture) {
      // Of a capture that has ended there is nothing to wait for.
      const auto& all = streams().captures;
      if (std::find(all.begin(), all.end(), event->capture) == all.end()) {
        return fail(cudaErrorCapturedEvent);
      }
      if (stream->capture && stream->capture != event->capture) {
        invalidate(*stream->capture);
        return fail(cudaErrorStreamCaptureMerge);
      }
      if (!stream->capture) {
        stream->capture = event->capture;
        stream->capture->streams.push_back(stream);
        stream->clock.clear();
      }
      for (const auto& [other, count] : event->clock) {
        stream->clock[other] = std::max(stream->clock[other], count);
      }
      return cudaSuccess;
    }
    if (stream->capture && moment && !(flags & cudaEventWaitExternal)) {
      invalidate(*stream->capture);
      return fail(cudaErrorStreamCaptureIsolation);
    }
  }
  if (moment) stream->enqueue([moment] { moment->wait(); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  std::shared_ptr<Moment> moments[2];
  for (int i = 0; i < 2; ++i) {
    const Shared event = event_of(i == 0 ? begin : end);
    bool captured = false;
    moments[i] = moment_of(event, captured);
    if (captured) return fail(cudaErrorCapturedEvent);
    if (!moments[i] || (event->flags & cudaEventDisableTiming)) {
      return fail(cudaErrorInvalidResourceHandle);
    }
    if (!moments[i]->reached()) return fail(cudaErrorNotReady);
  }
  *ms = static_cast<float>(static_cast<double>(moments[1]->ns() - moments[0]->ns()) / 1e6);
  return cudaSuccess;
}

// Captures and graphs.

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Stream* const stream = stream_of(handle);
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (handle == nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return fail(cudaErrorIllegalState);
  static uint64_t ids = 0;
  stream->capture = std::make_shared<Capture>(
      Capture{++ids, mode, std::this_thread::get_id(), stream, new Graph, {stream}});
  stream->clock.clear();
  streams().captures.push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  Stream* const stream = stream_of(handle);
  const auto capture = stream->capture;
  *graph = nullptr;
  if (!capture || capture->origin != stream) return fail(cudaErrorStreamCaptureUnmatched);
  bool unjoined = false;
  for (Stream* each : capture->streams) {
    unjoined |= stream->clock[each] < each->clock[each];
    if (each != stream) each->capture = nullptr;
  }
  stream->capture = nullptr;
  auto& all = streams().captures;
  all.erase(std::find(all.begin(), all.end(), capture));
  if (capture->invalid || unjoined) {
    delete capture->graph;
    return fail(capture->invalid ? cudaErrorStreamCaptureInvalidated
                                 : cudaErrorStreamCaptureUnjoined);
  }
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  const auto capture = stream_of(handle)->capture;
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = capture ? capture->id : 0;
  if (graph != nullptr) {
    *graph = capture ? reinterpret_cast<cudaGraph_t>(capture->graph) : nullptr;
  }
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

using Executable = std::shared_ptr<std::vector<Task>>;

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(
      new Executable(std::make_shared<std::vector<Task>>(reinterpret_cast<Graph*>(graph)->tasks)));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  stream_of(stream)->enqueue([tasks = *reinterpret_cast<Executable*>(graph)] {
    for (const Task& task : *tasks) task();
  });
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Executable*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->tasks.size();
  return cudaSuccess;
}

struct UserObject {
  void* data;
  cudaHostFn_t end;
  std::atomic<int> references;
};
cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* data, cudaHostFn_t end,
                                 unsigned references, unsigned) {
  *made =
      reinterpret_cast<cudaUserObject_t>(new UserObject{data, end, static_cast<int>(references)});
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
  auto* const object = reinterpret_cast<UserObject*>(handle);
  if ((object->references -= static_cast<int>(count)) > 0) return cudaSuccess;
  object->end(object->data);
  delete object;
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                      unsigned flags) {
  if (!(flags & cudaGraphUserObjectMove)) {
    reinterpret_cast<UserObject*>(object)->references += static_cast<int>(count);
  }
  reinterpret_cast<Graph*>(graph)->retained.emplace_back(
      [=] { cudaUserObjectRelease(object, count); });
  return cudaSuccess;
}

}  // extern "C"
