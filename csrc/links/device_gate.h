// Operations that a device runs long after they were issued pass the gate when the device comes to
// them. Two words of memory that the device shares stand for each: the device writes to one that it
// has come to the operation, and waits for the other before it goes on. A thread looks at the words
// and asks the gate. It calls nothing of the device, so it goes on while a call of the device's
// driver waits for an operation that is held.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gate.h"

namespace crux {

class DeviceGate {
 public:
  struct Words {
    std::atomic<uint32_t> reached;  // the device writes it
    std::atomic<uint32_t> open;     // the device waits for it
  };
  static_assert(sizeof(Words) == 8 && std::atomic<uint32_t>::is_always_lock_free);

  // Time between two looks of the thread while the device is to come to operations.
  static constexpr int64_t kPeriodNs = 50'000;
  // After one has waited in vain for the end of the one before, those that follow it do not wait
  // for that for this many times the longest wait.
  static constexpr int64_t kUnchainedWaits = 4;

  struct Lane;
  class Passage;
  using PassagePtr = std::shared_ptr<Passage>;

  // The words are zero, and outlive it. It is never destroyed, because its thread is not joined.
  DeviceGate(Words* words, size_t count);
  DeviceGate(const DeviceGate&) = delete;
  DeviceGate& operator=(const DeviceGate&) = delete;

  // A passage for an operation; null if there are no words for it. Operations of one lane run one
  // after the other. `entered` is called once it is in flight, on the thread.
  PassagePtr make(Gate& gate, const Gate::Route& route, std::pair<const void*, int32_t> lane,
                  std::function<void()> entered);
  // The device will come to it, and waits there if it `holds`. Without this call the words are free
  // again once the passage is left.
  void expect(PassagePtr passage, bool holds);
  // Lets everything go; there are no passages from now on.
  void stop() noexcept;

 private:
  void run();
  // Returns whether its words are free again.
  bool look(Passage& passage);
  bool goes_first(Passage& passage, int64_t now_ns, bool& in_vain);
  void give_back(Words* words) noexcept;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Words*> free_;
  std::vector<PassagePtr> incoming_;
  std::map<std::pair<const void*, int32_t>, std::shared_ptr<Lane>> lanes_;
  bool started_ = false;
  bool idle_ = false;
  bool stopping_ = false;

  std::mutex looking_;  // held throughout a look, and before mutex_
  std::vector<PassagePtr> expected_;
};

struct DeviceGate::Lane {
  std::weak_ptr<Passage> last;  // under the gate's mutex
  std::atomic<int64_t> unchained_until_ns{0};
};

class DeviceGate::Passage {
 public:
  Passage(DeviceGate& owner, Gate& gate, const Gate::Route& route, Words* words)
      : owner_(owner), gate_(gate), words_(words), number_(words->open.load() + 1) {
    attempt_.route = &route;
  }
  ~Passage() { leave(); }
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  Words& words() const noexcept { return *words_; }
  // The device writes this to the first word, and waits until the second is at least this.
  uint32_t number() const noexcept { return number_; }
  bool entered() const noexcept { return state_.load() == State::kIn; }
  // The operation has ended, or is not to be held any longer. From any thread, any number of times.
  void leave() noexcept;

 private:
  friend class DeviceGate;
  enum class State : uint8_t { kComing, kIn, kLeft };

  // With mutex_ held.
  void open() noexcept;

  DeviceGate& owner_;
  Gate& gate_;
  Words* const words_;
  const uint32_t number_;
  std::shared_ptr<Lane> lane_;
  std::function<void()> entered_;

  std::mutex mutex_;
  std::atomic<State> state_{State::kComing};
  bool expected_ = false;
  bool holds_ = false;
  bool opened_ = false;
  int64_t reached_ns_ = 0;
  PassagePtr before_;  // that is to end first
  Gate::Attempt attempt_;
  uint64_t ticket_ = 0;
};

}  // namespace crux
