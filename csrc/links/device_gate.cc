#include "device_gate.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <system_error>
#include <thread>

#include "../process.h"

namespace crux {
namespace {

// Beyond this number, lanes without an operation are forgotten.
constexpr size_t kKnownLanes = 1024;

}  // namespace

DeviceGate::DeviceGate(Words* words, size_t count) {
  for (size_t i = count; i > 0; --i) free_.push_back(&words[i - 1]);
}

DeviceGate::PassagePtr DeviceGate::make(Gate& gate, const Gate::Route& route,
                                        std::pair<const void*, int32_t> lane,
                                        std::function<void()> entered) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_ || free_.empty()) return nullptr;
  auto made = std::make_shared<Passage>(*this, gate, route, free_.back());
  free_.pop_back();
  if (lanes_.size() > kKnownLanes) {
    for (auto it = lanes_.begin(); it != lanes_.end();) {
      it = it->second->last.expired() ? lanes_.erase(it) : std::next(it);
    }
  }
  auto& known = lanes_[lane];
  if (!known) known = std::make_shared<Lane>();
  made->lane_ = known;
  made->entered_ = std::move(entered);
  return made;
}

void DeviceGate::expect(PassagePtr passage, bool holds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  {
    const std::lock_guard<std::mutex> also(passage->mutex_);
    passage->expected_ = true;
    passage->holds_ = holds;
    if (holds && monotonic_ns() >= passage->lane_->unchained_until_ns.load()) {
      passage->before_ = passage->lane_->last.lock();
    }
    if (stopping_) passage->open();
  }
  passage->lane_->last = passage;
  if (!started_ && !stopping_) {
    try {
      std::thread([this] { run(); }).detach();
      started_ = true;
    } catch (const std::system_error&) {
      // Nobody would look at it. The next one tries again.
      const std::lock_guard<std::mutex> also(passage->mutex_);
      passage->open();
    }
  }
  incoming_.push_back(std::move(passage));
  if (idle_) changed_.notify_one();
}

void DeviceGate::stop() noexcept {
  std::vector<PassagePtr> all;
  {
    const std::lock_guard<std::mutex> looking(looking_);
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    all.swap(incoming_);
    std::move(expected_.begin(), expected_.end(), std::back_inserter(all));
    expected_.clear();
    changed_.notify_all();
  }
  for (const PassagePtr& passage : all) passage->leave();
}

void DeviceGate::run() {
  (void)pthread_setname_np(pthread_self(), "crux_gate");
  // Otherwise short sleeps take 50 us longer than asked.
  (void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    std::vector<PassagePtr> done;
    bool waits = false;
    {
      const std::lock_guard<std::mutex> looking(looking_);
      {
        const std::lock_guard<std::mutex> also(mutex_);
        std::move(incoming_.begin(), incoming_.end(), std::back_inserter(expected_));
        incoming_.clear();
      }
      const auto rest =
          std::stable_partition(expected_.begin(), expected_.end(),
                                [this](const PassagePtr& passage) { return !look(*passage); });
      std::move(rest, expected_.end(), std::back_inserter(done));
      expected_.erase(rest, expected_.end());
      waits = !expected_.empty();
    }
    done.clear();
    lock.lock();
    if (waits) {
      changed_.wait_for(lock, std::chrono::nanoseconds(kPeriodNs), [this] { return stopping_; });
    } else {
      idle_ = true;
      changed_.wait(lock, [this] { return stopping_ || !incoming_.empty(); });
      idle_ = false;
    }
  }
}

bool DeviceGate::look(Passage& passage) {
  const bool reached = passage.words_->reached.load(std::memory_order_acquire) == passage.number_;
  // Until then a late write of the device could meet those of the next passage.
  if (!reached) return false;
  {
    const std::lock_guard<std::mutex> lock(passage.mutex_);
    if (passage.state_.load() == Passage::State::kComing) {
      const int64_t now_ns = monotonic_ns();
      if (passage.reached_ns_ == 0) passage.reached_ns_ = now_ns;
      bool in_vain = false;
      if (!goes_first(passage, now_ns, in_vain)) return false;
      passage.ticket_ = passage.holds_ && !in_vain ? passage.gate_.try_enter(passage.attempt_)
                                                   : passage.gate_.pass(passage.attempt_);
      if (passage.ticket_ == 0) return false;
      passage.state_.store(Passage::State::kIn);
      passage.open();
    }
  }
  give_back(passage.words_);
  if (passage.entered()) passage.entered_();
  return true;
}

// True if the one before it in its lane has ended, or if waiting for that any longer is in vain: it
// may take as long as it likes, and the device begins none of the lane until then.
bool DeviceGate::goes_first(Passage& passage, int64_t now_ns, bool& in_vain) {
  if (!passage.before_) return true;
  if (passage.before_->state_.load() != Passage::State::kLeft) {
    const int64_t wait_ns = passage.gate_.wait_ns();
    if (now_ns - passage.reached_ns_ < wait_ns) return false;
    in_vain = true;
    passage.lane_->unchained_until_ns.store(now_ns + kUnchainedWaits * wait_ns);
  }
  passage.before_.reset();
  return true;
}

void DeviceGate::give_back(Words* words) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(words);
}

void DeviceGate::Passage::open() noexcept {
  if (std::exchange(opened_, true)) return;
  words_->open.store(number_, std::memory_order_release);
}

void DeviceGate::Passage::leave() noexcept {
  PassagePtr before;
  uint64_t ticket = 0;
  bool unused = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_.exchange(State::kLeft) == State::kLeft) return;
    ticket = std::exchange(ticket_, 0);
    if (ticket == 0 && attempt_.route) gate_.give_up(attempt_);
    // Words that the device was never told of are as good as new, but for the number.
    unused = !expected_;
    open();
    before = std::move(before_);
  }
  if (ticket != 0) gate_.leave(ticket);
  if (unused) owner_.give_back(words_);
}

}  // namespace crux
