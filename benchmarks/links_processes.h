// Processes that share links, for links_driver.cc and what it measures.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../csrc/links/link_gate.h"
#include "../csrc/process_group/record.h"

namespace crux {

constexpr int64_t kMs = 1'000'000;
constexpr uint32_t kGroup = 0;
constexpr int64_t kBytes = 1 << 20;

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::_Exit(1);
}

inline void sleep_until(int64_t time_ns) {
  timespec time{};
  time.tv_sec = time_ns / 1'000'000'000;
  time.tv_nsec = time_ns % 1'000'000'000;
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) != 0) {
  }
}

inline void sleep_for(int64_t ns) { sleep_until(monotonic_ns() + ns); }

struct Folder {
  Folder() {
    std::string name = "/dev/shm/crux-links-XXXXXX";
    require(mkdtemp(name.data()) != nullptr, "mkdtemp");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// Memory that children share with their parent.
template <typename T>
struct Shared {
  explicit Shared(size_t count) : count_(count) {
    void* memory =
        mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, "mmap");
    items_ = static_cast<T*>(memory);
    for (size_t i = 0; i < count; ++i) new (&items_[i]) T();
  }
  ~Shared() { munmap(items_, count_ * sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator[](size_t i) const { return items_[i]; }

 private:
  const size_t count_;
  T* items_;
};

inline pid_t fork_to(const std::function<void()>& run) {
  const pid_t parent = getpid();
  const pid_t pid = fork();
  require(pid >= 0, "fork");
  if (pid != 0) return pid;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() == parent) run();
  std::_Exit(0);
}

inline void end(pid_t pid, int signal) {
  require(kill(pid, signal) == 0, "kill");
  require(waitpid(pid, nullptr, 0) == pid, "waitpid");
}

inline std::unique_ptr<LinkGate> member(const Folder& folder, const std::string& job, int level,
                                        int64_t wait_ns, int links = 1) {
  auto gate = std::make_unique<LinkGate>();
  std::vector<size_t> joined;
  for (int i = 0; i < links; ++i) {
    joined.push_back(gate->join(folder.path, "c", "link" + std::to_string(i), job));
  }
  gate->cross(kGroup, joined);
  gate->set_level(level);
  gate->set_wait_ns(wait_ns);
  return gate;
}

// Nanoseconds that this process was ready to run and had no core: what the machine adds to a wait.
inline int64_t without_core_ns() {
  static int file = -1;
  static pid_t opened_by = 0;
  if (opened_by != getpid()) {
    file = open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
    opened_by = getpid();
  }
  char text[96] = {};
  long long ran = 0, waited = 0;
  if (file < 0 || pread(file, text, sizeof(text) - 1, 0) <= 0) return 0;
  return std::sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : 0;
}

// Time that goes by only while the calling process runs, or sleeps of its own will.
inline int64_t own_time_ns() { return monotonic_ns() - without_core_ns(); }

struct Progress {
  std::atomic<uint64_t> operations{0};
  std::atomic<uint64_t> waits{0};
  std::atomic<uint64_t> ran_out{0};
  std::atomic<int64_t> longest_ns{0};
  // Times that the process was stopped or let go on.
  std::atomic<uint32_t> halts{0};

  uint64_t enter(LinkGate& gate) {
    const uint32_t halted = halts.load();
    const int64_t begin = own_time_ns();
    const uint64_t ticket = gate.enter(kGroup, kBytes);
    const int64_t took = own_time_ns() - begin;
    // What the process slept through is no wait.
    if (halted == halts.load()) longest_ns.store(std::max(longest_ns.load(), took));
    return ticket;
  }
  void left(const LinkGate& gate) {
    operations.fetch_add(1);
    waits.store(gate.waits().count);
    ran_out.store(gate.waits().ran_out);
  }
};

}  // namespace crux
