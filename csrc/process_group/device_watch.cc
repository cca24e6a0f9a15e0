#include "device_watch.h"

#include <Python.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <map>
#include <system_error>
#include <thread>

#include "cuda.h"
#include "stream_gate.h"

namespace crux {
namespace {

using std::chrono::microseconds;

// While an operation is in flight that others may wait for.
constexpr microseconds kClosePeriod{30};
// While the clock waits for an anchor, which may be off by half of this.
constexpr microseconds kAnchorPeriod{100};
// While only durations are waited for.
constexpr microseconds kWatchPeriod{2000};
// While measured operations gather.
constexpr microseconds kRecordPeriod{10000};
// Bytes that are kept alive only by handles, to learn durations.
constexpr int64_t kHeldBytes = 64 << 20;
// No device has more in flight. Some handles never report an end, for example those of torch's own
// all-reduce within a node.
constexpr size_t kWatchedOperations = 8192;
// Longest time that the end of the process waits for a pass to end.
constexpr std::chrono::milliseconds kStopLimit{200};

struct Watches {
  explicit Watches(uint32_t of) : generation(of) {}
  const uint32_t generation;
  std::mutex mutex;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::unique_ptr<DeviceWatch>> watches;
  std::atomic<bool> drop_is_pending{false};
};

// A forked process starts anew, because its parent's threads and locks do not exist there.
Watches& watches() {
  static std::atomic<Watches*> current{nullptr};
  const uint32_t generation = fork_generation();
  Watches* known = current.load();
  if (known && known->generation == generation) return *known;
  auto made = std::make_unique<Watches>(generation);
  if (current.compare_exchange_strong(known, made.get())) return *made.release();
  return *known;
}

std::vector<DeviceWatch*> all_watches() {
  Watches& known = watches();
  std::vector<DeviceWatch*> all;
  const std::lock_guard<std::mutex> lock(known.mutex);
  for (const auto& [device, watch] : known.watches) all.push_back(watch.get());
  return all;
}

// Called by Python, on its main thread, with the GIL.
int drop_all_handles(void*) {
  watches().drop_is_pending.store(false);
  for (DeviceWatch* watch : all_watches()) watch->drop_handles();
  return 0;
}

// The bytes that only the handle keeps alive, since the script has released them.
int64_t held_bytes(const DeviceWatch::Watched& watched) {
  // A block's handle keeps no outputs, and ProcessGroupNCCL's dereferences a null pointer when it
  // is asked for them. It gathers and scatters lists of unequal sizes in such blocks too.
  if (watched.op == Op::kCoalesced) return 0;
  if (watched.op == Op::kAllgather || watched.op == Op::kReduceScatter) return watched.bytes;
  // Handles that must be asked are ProcessGroupNCCL's: they have a future of the same outputs.
  const size_t references = watched.operation ? 2 : 1;
  int64_t bytes = 0;
  try {
    for (const at::Tensor& tensor : watched.work->result()) {
      if (!tensor.has_storage() || tensor.storage().use_count() > 1) continue;
      // This copy counts too, and so does Python's object, which lives as long as the tensor.
      const c10::impl::PyObjectSlot& slot = *tensor.unsafeGetTensorImpl()->pyobj_slot();
      const bool has_object = slot.load_pyobj() != nullptr;
      if (has_object && !slot.has_unique_reference()) continue;
      if (tensor.use_count() > references + (has_object ? 2 : 1)) continue;
      bytes += static_cast<int64_t>(tensor.storage().nbytes());
    }
  } catch (const std::exception&) {
    // A handle that does not give its results counts as holding none.
  }
  return bytes;
}

}  // namespace

DeviceWatch& DeviceWatch::of(c10::Device device) {
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  Watches& known = watches();
  const std::lock_guard<std::mutex> lock(known.mutex);
  auto& watch = known.watches[{device.type(), device.index()}];
  if (!watch) watch = std::make_unique<DeviceWatch>(device, known.generation);
  return *watch;
}

void DeviceWatch::forget(const void* owner, std::chrono::milliseconds patience) noexcept {
  const auto limit = std::chrono::steady_clock::now() + patience;
  for (DeviceWatch* watch : all_watches()) {
    while (watch->is_watching(owner) && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(kWatchPeriod);
    }
    watch->forget_here(owner);
  }
}

void DeviceWatch::stop_all() noexcept {
  release_streams();
  for (DeviceWatch* watch : all_watches()) watch->stop();
}

bool DeviceWatch::is_capturing() const noexcept {
  try {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    return crux::is_capturing(guard.getStream(device_));
  } catch (const std::exception&) {
    return true;
  }
}

DeviceClock::Mark DeviceWatch::mark(int64_t now_ns) noexcept {
  if (generation_ != fork_generation()) return {};
  try {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    bool looks = false;
    DeviceClock::Mark made = clock_.mark(guard.getStream(device_), now_ns, looks);
    if (looks) {
      const std::lock_guard<std::mutex> lock(mutex_);
      urgent_ = true;
      wake();
    }
    return made;
  } catch (const std::exception&) {
    return {};
  }
}

void DeviceWatch::watch(Watched&& watched) {
  if (generation_ != fork_generation()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool close = watched.gated.entered();
  incoming_.push_back(std::move(watched));
  if (idle_ || (close && !urgent_)) {
    urgent_ = urgent_ || close;
    wake();
  }
}

void DeviceWatch::hurry() {
  if (generation_ != fork_generation()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  urgent_ = true;
  wake();
}

void DeviceWatch::measured(DeviceOperation&& operation, std::shared_ptr<Lanes> lanes,
                           int64_t device_ns) {
  if (generation_ != fork_generation()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  measured_.push_back({std::move(operation), std::move(lanes), device_ns});
  if (idle_) wake();
}

void DeviceWatch::drop_handles() noexcept {
  if (!any_ended_.load(std::memory_order_relaxed)) return;
  std::vector<WorkPtr> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    any_ended_.store(false, std::memory_order_relaxed);
    ended.swap(ended_);
  }
}

void DeviceWatch::lay_aside(std::vector<WorkPtr>&& handles) {
  if (handles.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::move(handles.begin(), handles.end(), std::back_inserter(ended_));
    any_ended_.store(true, std::memory_order_relaxed);
  }
  // The next operation drops them, or Python if none follows.
  std::atomic<bool>& pending = watches().drop_is_pending;
  if (Py_IsInitialized() && !pending.exchange(true)) {
    if (Py_AddPendingCall(&drop_all_handles, nullptr) != 0) pending.store(false);
  }
}

// With mutex_ held.
void DeviceWatch::wake() {
  changed_.notify_one();
  if (started_) return;
  try {
    std::thread([this] { run(); }).detach();
    started_ = true;
  } catch (const std::system_error&) {
    return;  // the next operation tries again
  }
  // The device's driver ends with the process and must not be called afterwards.
  static const int registered = std::atexit([] { stop_all(); });
  (void)registered;
}

void DeviceWatch::stop() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  const auto limit = std::chrono::steady_clock::now() + kStopLimit;
  while (std::chrono::steady_clock::now() < limit) {
    if (passing_.try_lock()) return passing_.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void DeviceWatch::run() {
  (void)pthread_setname_np(pthread_self(), "crux_device");
  // Otherwise short sleeps take 50 us longer than asked.
  (void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  try {
    c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
  } catch (const std::exception&) {
    // Then operations are polled without it, because they know their device.
  }
  tolerate_captures(device_.type());
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    idle_ = false;
    urgent_ = false;
    lock.unlock();
    const microseconds pause = pass();
    lock.lock();
    if (stopping_) return;
    if (pause.count() != 0) {
      changed_.wait_for(lock, pause, [this] { return stopping_ || urgent_; });
    } else if (incoming_.empty() && measured_.empty() && !urgent_) {
      idle_ = true;
      changed_.wait(lock, [this] {
        return stopping_ || urgent_ || !incoming_.empty() || !measured_.empty();
      });
    }
  }
}

microseconds DeviceWatch::pass() {
  const std::lock_guard<std::mutex> in_pass(passing_);
  std::vector<Measured> measured;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return {};
    std::move(incoming_.begin(), incoming_.end(), std::back_inserter(watched_));
    incoming_.clear();
    measured.swap(measured_);
  }
  const bool anchors = clock_.look();
  std::stable_sort(measured.begin(), measured.end(), [](const Measured& a, const Measured& b) {
    return a.operation.whole.sequence < b.operation.whole.sequence;
  });
  for (Measured& done : measured) done.lanes->finish(done.operation, done.device_ns);
  std::vector<WorkPtr> unwatched;
  poll_all(unwatched);
  let_go_of_handles(unwatched);
  lay_aside(std::move(unwatched));
  const bool close = std::any_of(watched_.begin(), watched_.end(),
                                 [](const Watched& w) { return w.gated.entered(); });
  if (close) return kClosePeriod;
  if (anchors) return kAnchorPeriod;
  if (!watched_.empty()) return kWatchPeriod;
  return measured.empty() ? microseconds{0} : kRecordPeriod;
}

void DeviceWatch::poll_all(std::vector<WorkPtr>& ended) {
  std::vector<std::pair<const void*, int32_t>> running;
  auto kept = watched_.begin();
  for (Watched& watched : watched_) {
    const std::pair lane(watched.owner, watched.lane);
    const bool follows = std::find(running.begin(), running.end(), lane) != running.end();
    if (!follows && poll(watched)) {
      if (watched.work) ended.push_back(std::move(watched.work));
      continue;
    }
    if (!follows) running.push_back(lane);
    if (&*kept != &watched) *kept = std::move(watched);
    ++kept;
  }
  watched_.erase(kept, watched_.end());
}

bool DeviceWatch::poll(Watched& watched) {
  int64_t device_ns = kUnknownTime;
  try {
    const bool ended = watched.work ? watched.work->isCompleted() : watched.end.reached();
    if (!ended) return false;
    watched.gated.leave();
    if (!watched.operation) return true;
    if (!watched.work) {
      device_ns = watched.end.since_ns(watched.operation->mark);
    } else if (watched.work->exception()) {
      watched.operation->whole.status = Status::kFailed;
    } else {
      device_ns = static_cast<int64_t>(watched.work->getDuration() * 1e6);
    }
  } catch (const std::exception&) {
    // An operation that can't be polled, or was not timed, leaves an untimed record.
    watched.gated.leave();
    if (!watched.operation) return true;
  }
  watched.lanes->finish(*watched.operation, device_ns);
  return true;
}

// Handles keep outputs alive. If the script has dropped them, the stock backend would have released
// that memory. So the bytes and the number of such handles are limited; what is dropped is not
// timed.
void DeviceWatch::let_go_of_handles(std::vector<WorkPtr>& dropped) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_memory_look_) return;
  next_memory_look_ = now + kWatchPeriod;
  int64_t held = 0;
  for (Watched& watched : watched_) {
    watched.held_bytes = 0;
    if (!watched.work || watched.work.use_count() != 1) continue;
    watched.held_bytes = held_bytes(watched);
    held += watched.held_bytes;
  }
  size_t surplus = watched_.size() > kWatchedOperations ? watched_.size() - kWatchedOperations : 0;
  for (auto it = watched_.begin(); it != watched_.end() && (surplus > 0 || held > kHeldBytes);) {
    if (surplus > 0) {
      --surplus;
    } else if (it->held_bytes == 0) {
      ++it;
      continue;
    }
    held -= it->held_bytes;
    if (it->operation) it->lanes->finish(*it->operation, kUnknownTime);
    dropped.push_back(std::move(it->work));
    it = watched_.erase(it);
  }
}

bool DeviceWatch::is_watching(const void* owner) {
  const auto owned = [&](const Watched& watched) { return watched.owner == owner; };
  const std::lock_guard<std::mutex> in_pass(passing_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return false;
  return std::any_of(watched_.begin(), watched_.end(), owned) ||
         std::any_of(incoming_.begin(), incoming_.end(), owned);
}

void DeviceWatch::forget_here(const void* owner) {
  std::vector<Watched> gone;
  {
    const std::lock_guard<std::mutex> in_pass(passing_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::move(incoming_.begin(), incoming_.end(), std::back_inserter(watched_));
      incoming_.clear();
    }
    const auto rest =
        std::stable_partition(watched_.begin(), watched_.end(),
                              [&](const Watched& watched) { return watched.owner != owner; });
    std::move(rest, watched_.end(), std::back_inserter(gone));
    watched_.erase(rest, watched_.end());
    for (Watched& watched : gone) {
      if (poll(watched) || !watched.operation) continue;
      watched.operation->whole.status = Status::kIncomplete;
      watched.lanes->finish(*watched.operation, kUnknownTime);
    }
  }
}

}  // namespace crux
