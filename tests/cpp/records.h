// Records and threads for the tests of the recorder.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "../../csrc/process_group/recorder.h"

namespace crux {

inline constexpr uint32_t kProducers = 6;
inline constexpr uint64_t kPerProducer = 20000;

// Every field follows from the producer and the number, so that a torn record shows.
inline Record numbered(uint32_t producer, uint64_t number) {
  Record record;
  record.sequence = number;
  record.issue_ns = static_cast<int64_t>(number * kProducers + producer);
  record.start_ns = record.issue_ns + 1;
  record.end_ns = record.issue_ns + 2;
  record.device_ns = record.issue_ns + 3;
  record.bytes = record.issue_ns + 4;
  record.group = producer;
  record.world_size = producer + 1;
  record.peer = static_cast<int32_t>(number);
  record.op = static_cast<Op>(number % static_cast<uint64_t>(Op::kCount));
  record.flags = static_cast<uint8_t>(number);
  return record;
}

inline bool same(const Record& a, const Record& b) {
  return std::memcmp(&a, &b, sizeof(Record)) == 0;
}

inline std::vector<Record> drain_all(Recorder& recorder) {
  std::vector<Record> records;
  recorder.drain(SIZE_MAX, records);
  return records;
}

// Runs body(i) on `count` threads, all let go at once.
template <typename Body>
class Threads {
 public:
  Threads(uint32_t count, Body body) {
    for (uint32_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, body, i] {
        while (!go_.load(std::memory_order_acquire)) std::this_thread::yield();
        body(i);
      });
    }
    go_.store(true, std::memory_order_release);
  }
  ~Threads() { join(); }
  void join() {
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

 private:
  std::atomic<bool> go_{false};
  std::vector<std::thread> threads_;
};

}  // namespace crux
