#include "nccl.h"

#include <ATen/ATen.h>
#include <Python.h>
#include <pthread.h>

#include <algorithm>
#include <future>
#include <utility>

#include "tensors.h"
#include "violations.h"

namespace fake_gpu {
namespace {

using Started = Step::Started;

constexpr auto kSlice = std::chrono::milliseconds(20);

thread_local bool in_completion_hook = false;

std::atomic<uint64_t> next_key{1};

Nccl::GlooFactory& gloo_factory() {
  static auto* const factory = new Nccl::GlooFactory;
  return *factory;
}

// What a rank gets that waits for nothing.
class CompletedWork final : public c10d::Work {
 public:
  explicit CompletedWork(std::vector<at::Tensor> outputs = {}) : outputs_(std::move(outputs)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return outputs_; }

 private:
  const std::vector<at::Tensor> outputs_;
};

// Has another thread hold the GIL for as long as it lives: what takes it meanwhile comes to no end.
class GilHeld {
 public:
  GilHeld() {
    std::promise<void> held;
    holder_ = std::thread([this, &held] {
      const PyGILState_STATE state = PyGILState_Ensure();
      held.set_value();
      std::future<void> ended = done_.get_future();
      if (ended.wait_for(kLimit) != std::future_status::ready) {
        Violations::instance().add("hook_takes_gil", "a completion hook waits for the GIL");
      }
      PyGILState_Release(state);
    });
    held.get_future().wait();
  }
  ~GilHeld() {
    done_.set_value();
    holder_.join();
  }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  static constexpr auto kLimit = std::chrono::milliseconds(300);
  std::promise<void> done_;
  std::thread holder_;
};

}  // namespace

NcclOptions::NcclOptions(bool high_priority)
    : Options("nccl", std::chrono::minutes(10)), is_high_priority_stream(high_priority) {}

Communicator::~Communicator() {
  // Gloo's threads may be at an operation that no peer will ever join, and are waited for.
  if (aborted_) gloo_.release();
}

void Communicator::run(const std::vector<Step>& steps) {
  const std::lock_guard<std::mutex> lock(running_);
  TORCH_CHECK(!aborted_, "NCCL communicator was aborted");
  std::vector<Started> started;
  for (const Step& step : steps) started.push_back(step.start(*gloo_));
  for (const Started& part : started) {
    wait(part.works);
    if (part.finish) part.finish();
  }
}

void Communicator::wait(const Step::Works& works) {
  for (const auto& work : works) {
    const auto type = work->retrieveOpType();
    // The handle of a transfer is Gloo's buffer: it can't be polled, but ended.
    if (type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
        type == c10d::OpType::RECVANYSOURCE || type == c10d::OpType::UNKNOWN) {
      {
        const std::lock_guard<std::mutex> lock(transfers_mutex_);
        TORCH_CHECK(!aborted_, "NCCL communicator was aborted");
        transfers_.push_back(work);
      }
      const bool done = work->wait();
      const std::lock_guard<std::mutex> lock(transfers_mutex_);
      transfers_.erase(std::find(transfers_.begin(), transfers_.end(), work));
      TORCH_CHECK(done && !aborted_, "NCCL communicator was aborted");
      continue;
    }
    auto pause = std::chrono::microseconds(20);
    while (!work->isCompleted()) {
      TORCH_CHECK(!aborted_, "NCCL communicator was aborted");
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(1));
    }
    work->wait();
  }
}

void Communicator::abort() {
  const std::lock_guard<std::mutex> lock(transfers_mutex_);
  aborted_ = true;
  for (const auto& transfer : transfers_) transfer->abort();
}

std::vector<int64_t> Communicator::exchange(int64_t value, int size) {
  if (last) last->wait();
  at::Tensor mine = at::full({1}, value, at::kLong);
  at::Tensor all = at::zeros({size}, at::kLong);
  std::vector<std::vector<at::Tensor>> outputs{chunks(all, size)};
  std::vector<at::Tensor> inputs{mine};
  run({{[&](c10d::Backend& gloo) -> Started {
    return {{gloo.allgather(outputs, inputs, c10d::AllgatherOptions())}, nullptr};
  }}});
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + size};
}

void Nccl::set_gloo_factory(GlooFactory factory) { gloo_factory() = std::move(factory); }

Nccl::Nccl(StorePtr store, int rank, int size, c10::intrusive_ptr<NcclOptions> options)
    : Backend(rank, size),
      settings_(Controls::instance().settings()),
      store_(std::move(store)),
      options_(options ? std::move(options) : c10::make_intrusive<NcclOptions>()),
      timing_(settings_.timing) {
  watchdog_ = std::thread([this] { watch(); });
}

Nccl::~Nccl() {
  stop_watchdog();
  if (communicator_) communicator_->abort();
}

void Nccl::enter(const char* method) {
  if (in_completion_hook) {
    Violations::instance().add("hook_calls_back", std::string("a completion hook calls ") + method);
  }
}

void Nccl::count(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++counters_[what];
}

std::map<std::string, int64_t> Nccl::counters() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

bool Nccl::connected() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return communicator_ != nullptr;
}

void Nccl::connect(int device) {
  TORCH_CHECK(!closed_, "NCCL communicator was aborted or shut down");
  if (connected()) {
    TORCH_CHECK(device == device_, "the communicator is bound to device ", device_,
                " but an operation was issued on ", device);
    return;
  }
  if (options_->split_from) {
    const auto members = options_->split_from->split_on(options_->split_color, rank_);
    TORCH_CHECK(static_cast<int>(members.size()) == size_, "fakenccl: ", members.size(),
                " ranks split off a group of ", size_);
    options_->split_from.reset();
  }
  auto made = std::make_shared<Communicator>(gloo_factory()(store_, rank_, size_));
  const std::lock_guard<std::mutex> lock(mutex_);
  communicator_ = std::move(made);
  device_ = device;
  stream_ = &Streams::instance().make(device, options_->is_high_priority_stream);
  ++counters_["connect"];
}

Nccl::WorkPtr Nccl::issue(Call call) {
  enter("an operation");
  const Tensors& known = call.inputs.empty() ? call.outputs : call.inputs;
  if (call.device < 0) {
    call.device = known.empty() ? Streams::current_device() : known.front().device().index();
  }
  for (const Tensors* tensors : {&call.inputs, &call.outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.is_privateuseone(), "No backend type associated with device type ",
                  c10::DeviceTypeName(tensor.device().type(), true));
    }
  }
  connect(call.device);
  if (call.timeout == c10d::kUnsetTimeout) call.timeout = options_->timeout;
  const bool capturing = Streams::instance().current(call.device).capturing();
  if (!settings_.legacy && !capturing) {
    retire();
    throw_if_failed();
  } else if (settings_.legacy) {
    TORCH_CHECK(getError() == c10d::ErrorType::SUCCESS, "NCCL communicator was aborted");
  }
  const bool transfer = call.type == c10d::OpType::SEND || call.type == c10d::OpType::RECV;
  if (block_ && (settings_.legacy || transfer)) {
    const bool async = call.async;
    Tensors outputs = call.outputs;
    block_->calls.push_back(std::move(call));
    if (settings_.legacy && !async) return nullptr;
    return c10::make_intrusive<CompletedWork>(std::move(outputs));
  }
  return launch(std::move(call), block_.has_value());
}

Nccl::WorkPtr Nccl::launch(Call call, bool coalesced) {
  const std::string name = c10d::opTypeToString(call.type);
  std::vector<Fault> faults = Controls::instance().take(name, rank_);
  for (const Fault& fault : faults) {
    TORCH_CHECK(fault.kind != "refuse", "fakenccl: ", name, " is refused");
  }
  Stream& current = Streams::instance().current(call.device);
  // Synchronous operations run on the current stream.
  Stream& stream = call.async ? *stream_ : current;

  auto operation = std::make_shared<Operation>();
  operation->key = next_key++;
  operation->sequence = ++sequence_;
  operation->type = call.type;
  operation->device = call.device;
  operation->legacy = settings_.legacy;
  operation->timing = timing_;
  operation->issue_ns = now_ns();
  operation->timeout = call.timeout;
  for (const auto& more : ephemeral_) operation->timeout += more;
  operation->captured = current.capturing();

  Issued issued;
  issued.op = name;
  issued.sequence = operation->sequence;
  issued.group = options_->group_name;
  issued.rank = rank_;
  issued.size = size_;
  issued.device = call.device;
  issued.stream = current.id();
  issued.on_stream = stream.id();
  issued.bytes = call.bytes;
  issued.peer = call.peer;
  issued.tag = call.tag;
  issued.timeout_ms = operation->timeout.count();
  issued.async = call.async;
  issued.captured = operation->captured;
  issued.coalesced = coalesced;
  issued.thread = static_cast<uint64_t>(pthread_self());
  issued.issue_ns = operation->issue_ns;
  operation->log_index = Controls::instance().log(issued);

  if (call.async) stream.wait_for(current.record());
  if (call.async) {
    Tensors kept = call.inputs;
    append(kept, call.outputs);
    operation->stash(std::move(kept));
  }
  const MomentPtr before = operation->captured ? nullptr : communicator_->last;
  const uint64_t held = Controls::instance().holds();
  // The task must not keep the moment that it itself brings about, nor tensors.
  const std::weak_ptr<Operation> weak = operation;
  const OperationPtr keep = operation->captured ? nullptr : operation;
  operation->end = stream.enqueue([communicator = communicator_, steps = std::move(call.steps),
                                   before, faults = std::move(faults), held, weak, keep] {
    const OperationPtr self = weak.lock();
    if (before) before->wait();
    const int64_t start = now_ns();
    if (self) {
      self->start_ns = start;
      Controls::instance().started(self->log_index, start);
    }
    const auto sleep = [](double seconds) {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    };
    std::string error;
    for (const Fault& fault : faults) {
      if (fault.kind == "delay") sleep(fault.seconds);
      if (fault.kind == "hold") {
        Controls::instance().wait_for_release(held, communicator->aborted());
      }
      if (fault.kind == "error") error = "NCCL operation failed: injected error";
    }
    try {
      communicator->run(steps);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    for (const Fault& fault : faults) {
      if (fault.kind == "late") sleep(fault.seconds);
    }
    if (self && !error.empty()) self->fail(Status::kFailed, error);
    if (self) Controls::instance().ended(self->log_index, now_ns());
  });
  if (!operation->captured) {
    communicator_->last = operation->end;
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    queues_[&stream].push_back(operation);
  }

  auto work = c10::make_intrusive<Work>(rank_, operation, call.outputs, call.host_blocking);
  if (settings_.legacy && coalesced) work->forget_outputs();
  if (settings_.legacy) work->make_future(stream);
  if (block_ && !settings_.legacy) {
    block_->operations.push_back(operation);
    block_->last = work;
  }
  // The legacy class gives no handle where there is nothing to wait for. A barrier has waited.
  if (!settings_.legacy || call.async) return work;
  if (call.host_blocking && !current.capturing()) current.synchronize();
  return nullptr;
}

Nccl::Call Nccl::together(std::vector<Call> calls, c10d::OpType type) {
  Call all = std::move(calls.front());
  all.type = type;
  for (size_t i = 1; i < calls.size(); ++i) {
    for (Step& step : calls[i].steps) all.steps.push_back(std::move(step));
    append(all.inputs, calls[i].inputs);
    append(all.outputs, calls[i].outputs);
    all.bytes += calls[i].bytes;
    all.async = all.async || calls[i].async;
  }
  return all;
}

Nccl::WorkPtr Nccl::issue_all(std::vector<Call> calls) {
  TORCH_CHECK(!calls.empty(), "Tensor list must be nonempty");
  if (settings_.legacy) {
    const auto type = calls.front().type;
    return issue(together(std::move(calls), type));
  }
  Tensors outputs;
  OperationPtr first;
  WorkPtr last;
  for (Call& call : calls) {
    append(outputs, call.outputs);
    last = issue(std::move(call));
    if (auto* work = dynamic_cast<Work*>(last.get())) {
      if (!first) first = work->operation();
      if (work->operation() != first) work->operation()->first = first;
      work->set_outputs(outputs);
    }
  }
  return last;
}

void Nccl::startCoalescing() {
  enter("startCoalescing");
  TORCH_CHECK(settings_.legacy || !block_,
              "startCoalescing called while a batch is already active");
  block_.emplace();
}

Nccl::WorkPtr Nccl::endCoalescing() {
  enter("endCoalescing");
  TORCH_CHECK(block_, "endCoalescing called without a matching startCoalescing");
  Block block = std::move(*block_);
  block_.reset();
  if (!block.calls.empty()) {
    return launch(together(std::move(block.calls), c10d::OpType::COALESCED), true);
  }
  if (!block.last) return c10::make_intrusive<CompletedWork>();
  if (block.operations.size() > 1) block.operations.back()->first = block.operations.front();
  return block.last;
}

std::vector<int> Nccl::split_on(int64_t color, int64_t key) {
  connect(device_ >= 0 ? device_ : Streams::current_device());
  count("split");
  const auto colors = communicator_->exchange(color, size_);
  const auto keys = communicator_->exchange(key, size_);
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank) {
    if (color >= 0 && colors[static_cast<size_t>(rank)] == color) members.push_back(rank);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return keys[static_cast<size_t>(a)] < keys[static_cast<size_t>(b)];
  });
  return members;
}

void Nccl::perform_nocolor_split() {
  enter("perform_nocolor_split");
  split_on(-1, 0);
}

Nccl::BackendPtr Nccl::split(const StorePtr& store, const std::vector<int>& ranks,
                             const OptionsPtr& opts) {
  enter("split");
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) {
    split_on(-1, 0);
    return nullptr;
  }
  int64_t color = 0;
  for (const int rank : ranks) color = (color * 31 + rank + 1) % 1'000'003;
  const auto key = static_cast<int64_t>(mine - ranks.begin());
  const auto members = split_on(color, key);
  TORCH_CHECK(members == ranks, "fakenccl: the ranks of a split don't agree on its members");
  auto options = c10::dynamic_intrusive_pointer_cast<NcclOptions>(opts);
  if (!options) options = c10::make_intrusive<NcclOptions>(*options_);
  options->split_from.reset();
  auto child = c10::make_intrusive<Nccl>(store, static_cast<int>(key),
                                         static_cast<int>(ranks.size()), options);
  child->timing_ = timing_.load();
  child->connect(device_);
  return child;
}

void Nccl::setTimeout(std::chrono::milliseconds timeout) { options_->timeout = timeout; }

#ifdef FAKE_GPU_HAS_ADDEPHEMERALTIMEOUT
void Nccl::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  ephemeral_.push_back(timeout);
}
#endif

#ifdef FAKE_GPU_HAS_SUPPORTSABORTHOOKS
void Nccl::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  const std::lock_guard<std::mutex> lock(hooks_mutex_);
  abort_hooks_[id] = std::move(hook);
}

void Nccl::unregisterAbortHook(int64_t id) {
  const std::lock_guard<std::mutex> lock(hooks_mutex_);
  abort_hooks_.erase(id);
}
#endif

#ifdef FAKE_GPU_HAS_SUPPORTSCOMPLETIONHOOKS
void Nccl::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  enter("registerCompletionHook");
  TORCH_CHECK(!settings_.legacy, "Backend nccl does not support registerCompletionHook");
  const std::lock_guard<std::mutex> lock(hooks_mutex_);
  completion_hooks_[id] = std::move(hook);
}

void Nccl::unregisterCompletionHook(int64_t id) {
  enter("unregisterCompletionHook");
  const std::lock_guard<std::mutex> lock(hooks_mutex_);
  completion_hooks_.erase(id);
}
#endif

#ifdef FAKE_GPU_HAS_SETBOUNDDEVICEID
void Nccl::setBoundDeviceId(std::optional<at::Device> device) {
  Backend::setBoundDeviceId(device);
  if (device && !settings_.legacy && !options_->lazy_init) connect(device->index());
}
#endif

void Nccl::eagerConnectSingleDevice(at::Device device) {
  enter("eagerConnectSingleDevice");
  connect(device.index());
}

void Nccl::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(settings_.legacy,
              "Only ProcessGrouppNCCL supports onCompletion hook, but got nccl2 backend.");
  TORCH_CHECK(timing_, "OnCompletion hook requires recording start and end events");
  TORCH_CHECK(!onCompletionHook_, "OnCompletion hook is already registered");
  const std::lock_guard<std::mutex> lock(hooks_mutex_);
  onCompletionHook_ = std::move(hook);
}

void Nccl::waitForPendingWorks() {
  enter("waitForPendingWorks");
  TORCH_CHECK(settings_.legacy,
              "Only ProcessGrouppNCCL supports waitForPendingWorks, but got nccl2 backend.");
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(queue_mutex_);
      if (queues_.empty() || error_) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Nccl::enableCollectivesTiming() {
  enter("enableCollectivesTiming");
  timing_ = true;
}

c10d::ErrorType Nccl::getError() { return static_cast<c10d::ErrorType>(error_.load()); }

std::shared_ptr<c10::Allocator> Nccl::getMemAllocator() {
  count("mem_allocator");
  return {allocator(), [](c10::Allocator*) {}};
}

at::Tensor Nccl::allocateTensor(long size, at::TensorOptions options) {
  count("allocate_tensor");
  return at::empty({size}, options);
}

void Nccl::report(const OperationPtr& operation) {
  if (operation->status() != Status::kCompleted) return;
#ifdef FAKE_GPU_HAS_SUPPORTSCOMPLETIONHOOKS
  c10d::CompletionHookArgs args;
  args.completionKey = operation->key;
  if (operation->timing) args.duration_ms = operation->duration_ms();
  // Before the lock, which a thread with the GIL may wait for.
  std::optional<GilHeld> held;
  if (settings_.strict_hooks && !PyGILState_Check()) held.emplace();
  const std::lock_guard<std::mutex> lock(hooks_mutex_);
  in_completion_hook = true;
  for (const auto& [id, hook] : completion_hooks_) hook(args);
  in_completion_hook = false;
#endif
  if (onCompletionHook_) {
    onCompletionHook_(std::make_shared<c10d::WorkInfo>(
        operation->type, operation->sequence, operation->issued_at,
        std::chrono::steady_clock::now(),
        std::chrono::duration<float, std::milli>(operation->duration_ms())));
  }
}

void Nccl::run_abort_hooks() {
#ifdef FAKE_GPU_HAS_SUPPORTSABORTHOOKS
  std::unordered_map<int64_t, c10d::AbortHook> hooks;
  {
    const std::lock_guard<std::mutex> lock(hooks_mutex_);
    hooks = abort_hooks_;
  }
  for (const auto& [id, hook] : hooks) hook();
#endif
}

void Nccl::retire() {
  const RelaxedCaptureMode relaxed;
  std::vector<OperationPtr> ended;
  std::vector<OperationPtr> failed;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    for (auto entry = queues_.begin(); entry != queues_.end();) {
      auto& queue = entry->second;
      while (!queue.empty()) {
        const Status status = queue.front()->check();
        if (status == Status::kRunning) break;
        (status == Status::kCompleted ? ended : failed).push_back(queue.front());
        queue.pop_front();
      }
      entry = queue.empty() ? queues_.erase(entry) : std::next(entry);
    }
  }
  for (const OperationPtr& operation : ended) {
    ephemeral_.clear();
    operation->unstash();
    report(operation);
  }
  for (const OperationPtr& operation : failed) {
    const bool timed_out = operation->status() == Status::kTimedOut;
    error_ = static_cast<int>(timed_out ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR);
    run_abort_hooks();
    report(operation);
  }
}

void Nccl::throw_if_failed() {
  const auto error = getError();
  if (error == c10d::ErrorType::SUCCESS) return;
  C10_THROW_ERROR(DistBackendError, error == c10d::ErrorType::TIMEOUT
                                        ? "NCCL operation timed out"
                                        : "NCCL communicator was aborted after an error");
}

void Nccl::watch() {
  pthread_setname_np(pthread_self(), "fakenccl_watch");
  std::unique_lock<std::mutex> lock(watchdog_mutex_);
  while (!stopping_) {
    watchdog_changed_.wait_for(lock, std::chrono::nanoseconds(settings_.watchdog_period_ns),
                               [this] { return stopping_; });
    if (stopping_) return;
    lock.unlock();
    retire();
    lock.lock();
  }
}

void Nccl::stop_watchdog() {
  {
    const std::lock_guard<std::mutex> lock(watchdog_mutex_);
    stopping_ = true;
  }
  watchdog_changed_.notify_all();
  if (!watchdog_.joinable()) return;
  if (watchdog_.get_id() == std::this_thread::get_id()) return watchdog_.detach();
  // Python may drop the backend while GilHeld waits for the GIL on the watchdog.
  PyThreadState* const state =
      Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  watchdog_.join();
  if (state) PyEval_RestoreThread(state);
}

void Nccl::abort() {
  enter("abort");
  count("abort");
  if (closed_) return;
  closed_ = true;
  if (connected()) communicator_->abort();
  run_abort_hooks();
  std::vector<OperationPtr> pending;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    for (const auto& [stream, queue] : queues_) {
      pending.insert(pending.end(), queue.begin(), queue.end());
    }
    queues_.clear();
  }
  for (const OperationPtr& operation : pending) {
    if (operation->check() == Status::kRunning) {
      operation->fail(Status::kFailed, "NCCL communicator was aborted");
    }
  }
  error_ = static_cast<int>(c10d::ErrorType::COMM_ERROR);
  stop_watchdog();
}

void Nccl::shutdown() {
  enter("shutdown");
  count("shutdown");
  if (closed_) return;
  closed_ = true;
  while (true) {
    retire();
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    if (queues_.empty() || error_) break;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  stop_watchdog();
}

}  // namespace fake_gpu
