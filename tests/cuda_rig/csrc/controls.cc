#include "controls.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "stream.h"

namespace cuda_rig {
namespace {

struct Wanted {
  Fault fault;
  std::string op;
  int64_t count;
};

struct Controls {
  std::mutex mutex;
  std::condition_variable released;
  uint64_t releases = 0;
  std::vector<Wanted> faults;
  std::map<std::string, uint64_t> calls;
  std::deque<Issued> issued;
  // Number of the first that is kept.
  uint64_t first = 0;
};

Controls& controls() {
  static auto* const made = new Controls;
  return *made;
}

constexpr size_t kKept = 1 << 16;
// How many on the link take time, in memory that processes share.
using Carriers = std::atomic<int>;
std::atomic<Carriers*> carriers{nullptr};
// After this much of a delay, its share of the link is looked at again.
constexpr double kPartS = 1e-3;

constexpr auto kLook = std::chrono::milliseconds(5);

bool on_first_thread() { return gettid() == getpid(); }

char* copy(const std::string& text) { return strdup(text.c_str()); }

}  // namespace

void count_call(const char* name) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  ++controls().calls[std::string(on_first_thread() ? "first " : "other ") + name];
}

uint64_t log_issued(Issued issued) {
  issued.first_thread = on_first_thread();
  issued.issue_ns = now_ns();
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().issued.push_back(std::move(issued));
  if (controls().issued.size() > kKept) {
    controls().issued.pop_front();
    ++controls().first;
  }
  return controls().first + controls().issued.size() - 1;
}

void log_ran(uint64_t number, int64_t start_ns, int64_t end_ns) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  if (number < controls().first) return;
  Issued& issued = controls().issued[number - controls().first];
  issued.start_ns = start_ns;
  issued.end_ns = end_ns;
}

Fault take_fault(const std::string& op, bool on_device) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  auto& all = controls().faults;
  for (auto it = all.begin(); it != all.end(); ++it) {
    if ((!it->op.empty() && it->op != op) || (it->fault.kind != "refuse") != on_device) continue;
    Fault found = it->fault;
    found.releases = controls().releases;
    if (--it->count == 0) all.erase(it);
    return found;
  }
  return {};
}

void take_time(double seconds) {
  Carriers* const all = carriers.load();
  const auto take = [](double part) {
    std::this_thread::sleep_for(std::chrono::duration<double>(part));
  };
  if (all == nullptr) return take(seconds);
  ++*all;
  for (int64_t begin_ns = now_ns(); seconds > 0;) {
    take(std::min(seconds, kPartS));
    const int64_t end_ns = now_ns();
    seconds -= static_cast<double>(end_ns - begin_ns) / 1e9 / std::max(1, all->load());
    begin_ns = end_ns;
  }
  --*all;
}

void hold(const Fault& fault, const std::atomic<bool>& aborted) {
  std::unique_lock<std::mutex> lock(controls().mutex);
  while (controls().releases == fault.releases && !aborted) {
    controls().released.wait_for(lock, kLook);
  }
}

}  // namespace cuda_rig

using namespace cuda_rig;

// For ctypes: tests/cuda_rig/control.py. The caller frees what is returned as text.
extern "C" {

void rig_inject(const char* kind, const char* op, double seconds, int64_t count) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().faults.push_back({{kind, seconds, 0}, op, count});
}

void rig_release() {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  ++controls().releases;
  controls().faults.clear();
  controls().released.notify_all();
}

void rig_clear() {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().calls.clear();
  controls().first += controls().issued.size();
  controls().issued.clear();
}

int rig_share(const char* path) {
  if (*path == '\0') {
    carriers.store(nullptr);
    return 0;
  }
  const int file = open(path, O_RDWR);
  void* const memory = mmap(nullptr, sizeof(Carriers), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return -1;
  carriers.store(static_cast<Carriers*>(memory));
  return 0;
}

char* rig_calls() {
  std::ostringstream out;
  const std::lock_guard<std::mutex> lock(controls().mutex);
  for (const auto& [name, count] : controls().calls) out << name << "\t" << count << "\n";
  return copy(out.str());
}

char* rig_issued() {
  std::ostringstream out;
  const std::lock_guard<std::mutex> lock(controls().mutex);
  for (const Issued& each : controls().issued) {
    out << each.op << "\t" << each.communicator << "\t" << each.rank << "\t" << each.size << "\t"
        << each.peer << "\t" << each.type << "\t" << each.reduction << "\t" << each.count << "\t"
        << each.bytes << "\t" << reinterpret_cast<uintptr_t>(each.stream) << "\t" << each.captured
        << "\t" << each.first_thread << "\t" << each.issue_ns << "\t" << each.start_ns << "\t"
        << each.end_ns << "\n";
  }
  return copy(out.str());
}

}  // extern "C"
