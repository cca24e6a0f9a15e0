// What benchmarks/links.py measures, without Python and torch: the semaphores of a host's links
// (csrc/links) between real processes. Each command prints one line of JSON.
//
//   cost REPEATS                                     ns of enter and leave, by who else is there
//   contend SECONDS WAIT_MS GATE(0|1) LOWER          one job above LOWER others on one link
//   death ROUNDS WAIT_MS                             from a holder's death to the next operation
//   hang SECONDS WAIT_MS                             what a job that hangs costs a lower one
//   soak SECONDS WAIT_MS PROCESSES SEED              storms of kills and halts, and calms

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
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../csrc/links/link_gate.h"
#include "../csrc/process_group/record.h"

namespace crux {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr uint32_t kGroup = 0;
constexpr int64_t kBytes = 1 << 20;

void require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::_Exit(1);
}

void sleep_until(int64_t time_ns) {
  timespec time{};
  time.tv_sec = time_ns / 1'000'000'000;
  time.tv_nsec = time_ns % 1'000'000'000;
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) != 0) {
  }
}

void sleep_for(int64_t ns) { sleep_until(monotonic_ns() + ns); }

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

pid_t fork_to(const std::function<void()>& run) {
  const pid_t parent = getpid();
  const pid_t pid = fork();
  require(pid >= 0, "fork");
  if (pid != 0) return pid;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() == parent) run();
  std::_Exit(0);
}

void end(pid_t pid, int signal) {
  require(kill(pid, signal) == 0, "kill");
  require(waitpid(pid, nullptr, 0) == pid, "waitpid");
}

std::unique_ptr<LinkGate> member(const Folder& folder, const std::string& job, int level,
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

struct Samples {
  std::vector<int64_t> ns;
  double quantile_ms(double share) {
    if (ns.empty()) return 0.0;
    std::sort(ns.begin(), ns.end());
    const auto at = static_cast<size_t>(share * static_cast<double>(ns.size() - 1) + 0.5);
    return static_cast<double>(ns[at]) / 1e6;
  }
};

int64_t cpu_ns() {
  timespec now{};
  require(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0, "clock_gettime");
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Median over `repeats` of the ns of CPU time that one of many calls takes.
double median_ns(int repeats, const std::function<void()>& call) {
  constexpr int kCalls = 20'000;
  std::vector<double> found;
  for (int i = 0; i < repeats; ++i) {
    const int64_t begin = cpu_ns();
    for (int j = 0; j < kCalls; ++j) call();
    found.push_back(static_cast<double>(cpu_ns() - begin) / kCalls);
  }
  std::nth_element(found.begin(), found.begin() + repeats / 2, found.end());
  return found[static_cast<size_t>(repeats / 2)];
}

void cost(int repeats) {
  std::printf("{");
  set_gate(nullptr);
  const auto ask = [] {
    Gate* const installed = gate();
    const uint64_t ticket = installed ? installed->enter(kGroup, kBytes) : 0;
    if (installed) installed->leave(ticket);
  };
  std::printf("\"no gate\": %.2f", median_ns(repeats, ask));
  const auto with = [&](const char* name, int links, size_t others) {
    const Folder folder;
    const auto own = member(folder, "own", 1, 500 * kMs, links);
    std::vector<std::unique_ptr<LinkGate>> idle;
    for (size_t i = 0; i < others; ++i) {
      idle.push_back(member(folder, "other" + std::to_string(i), 2, 500 * kMs, links));
    }
    set_gate(own.get());
    std::printf(", \"%s\": %.2f", name, median_ns(repeats, ask));
    set_gate(nullptr);
  };
  with("1 link, 1 other process", 1, 1);
  with("1 link, 7 other processes", 1, 7);
  with("1 link, 23 other processes", 1, 23);
  with("4 links, 7 other processes", 4, 7);
  std::printf("}\n");
}

// A link that serves chunks in the order in which they are asked for: what transfers that send
// chunk by chunk share fairly. It is reserved ahead by one word, so a process that dies holds
// nothing.
struct BusyLink {
  // How long the chunk waited for the link; returns when it is through.
  int64_t send(int64_t chunk_ns) {
    const int64_t asked = monotonic_ns();
    int64_t free = free_at_ns.load();
    int64_t begin = 0;
    do {
      begin = std::max(asked, free);
    } while (!free_at_ns.compare_exchange_weak(free, begin + chunk_ns));
    sleep_until(begin + chunk_ns);
    return begin - asked;
  }
  std::atomic<int64_t> free_at_ns{0};
};

// Nanoseconds that this process was ready to run and had no core: what the machine adds to a wait.
int64_t without_core_ns() {
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
int64_t own_time_ns() { return monotonic_ns() - without_core_ns(); }

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

void contend(int64_t seconds, int64_t wait_ns, bool gated, size_t lower) {
  constexpr int64_t kChunk = kMs, kHighChunks = 20, kLowChunks = 10, kCompute = 30 * kMs;
  const Folder folder;
  const Shared<BusyLink> link(1);
  const Shared<Progress> progress(lower);
  std::vector<pid_t> running;
  for (size_t i = 0; i < lower; ++i) {
    running.push_back(fork_to([&, i] {
      const auto own = member(folder, "low" + std::to_string(i), 1, wait_ns);
      for (;;) {
        const uint64_t ticket = gated ? progress[i].enter(*own) : 0;
        for (int64_t chunk = 0; chunk < kLowChunks; ++chunk) link[0].send(kChunk);
        if (gated) own->leave(ticket);
        progress[i].left(*own);
      }
    }));
  }
  const auto own = member(folder, "high", 2, wait_ns);
  Samples waited, took;
  sleep_for(100 * kMs);
  const int64_t until = monotonic_ns() + seconds * 1000 * kMs;
  while (monotonic_ns() < until) {
    sleep_for(kCompute);
    const int64_t begin = monotonic_ns(), own_begin = own_time_ns();
    const uint64_t ticket = gated ? own->enter(kGroup, kBytes) : 0;
    int64_t wait = own_time_ns() - own_begin;
    for (int64_t chunk = 0; chunk < kHighChunks; ++chunk) wait += link[0].send(kChunk);
    if (gated) own->leave(ticket);
    waited.ns.push_back(wait);
    took.ns.push_back(monotonic_ns() - begin);
  }
  for (const pid_t pid : running) end(pid, SIGKILL);
  uint64_t operations = 0, ran_out = 0;
  int64_t longest_ns = 0;
  for (size_t i = 0; i < lower; ++i) {
    operations += progress[i].operations.load();
    ran_out += progress[i].ran_out.load();
    longest_ns = std::max(longest_ns, progress[i].longest_ns.load());
  }
  std::printf(
      "{\"gate\": %s, \"lower\": %zu, \"transfers\": %zu, \"lower_transfer_ms\": %.1f, "
      "\"alone_ms\": %.1f, \"wait_p50_ms\": %.3f, \"wait_p99_ms\": %.3f, \"wait_max_ms\": %.3f, "
      "\"took_p50_ms\": %.3f, \"took_p99_ms\": %.3f, \"gate_waits\": %llu, "
      "\"lower_transfers\": %llu, \"lower_ran_out\": %llu, \"lower_longest_ms\": %.3f}\n",
      gated ? "true" : "false", lower, waited.ns.size(), kLowChunks * kChunk / 1e6,
      kHighChunks * kChunk / 1e6, waited.quantile_ms(0.5), waited.quantile_ms(0.99),
      waited.quantile_ms(1.0), took.quantile_ms(0.5), took.quantile_ms(0.99),
      static_cast<unsigned long long>(own->waits().count),
      static_cast<unsigned long long>(operations), static_cast<unsigned long long>(ran_out),
      static_cast<double>(longest_ns) / 1e6);
}

void death(int rounds, int64_t wait_ns) {
  const Folder folder;
  const Shared<std::atomic<int64_t>> word(1);
  const auto own = member(folder, "low", 1, wait_ns);
  Samples after;
  std::minstd_rand random(1);
  for (int round = 0; round < rounds; ++round) {
    word[0].store(0);
    const pid_t holder = fork_to([&] {
      const auto high = member(folder, "high", 2, wait_ns);
      (void)high->enter(kGroup, kBytes);
      word[0].store(1);
      pause();
    });
    while (word[0].load() == 0) sleep_for(kMs / 10);
    const int64_t at = monotonic_ns() + static_cast<int64_t>(20 + random() % 20) * kMs;
    const pid_t killer = fork_to([&] {
      sleep_until(at);
      word[0].store(monotonic_ns());
      (void)kill(holder, SIGKILL);
    });
    const int64_t less = without_core_ns();
    own->leave(own->enter(kGroup, kBytes));
    const int64_t free = monotonic_ns() - (without_core_ns() - less);
    require(waitpid(killer, nullptr, 0) == killer, "waitpid");
    require(waitpid(holder, nullptr, 0) == holder, "waitpid");
    after.ns.push_back(free - word[0].load());
  }
  const LinkGate::Waits waits = own->waits();
  std::printf(
      "{\"deaths\": %d, \"waits\": %llu, \"ran_out\": %llu, \"look_again_ms\": %.1f, "
      "\"bound_ms\": %.1f, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"max_ms\": %.3f}\n",
      rounds, static_cast<unsigned long long>(waits.count),
      static_cast<unsigned long long>(waits.ran_out), LinkTable::kLookAgainNs / 1e6, wait_ns / 1e6,
      after.quantile_ms(0.5), after.quantile_ms(0.99), after.quantile_ms(1.0));
}

void hang(int64_t seconds, int64_t wait_ns) {
  constexpr int64_t kOperation = 5 * kMs;
  const Folder folder;
  const auto own = member(folder, "low", 1, wait_ns);
  const auto run = [&](bool busy) {
    const Shared<std::atomic<bool>> ready(1);
    // In flight for good; `busy` gives signs of life all the same.
    const pid_t holder = fork_to([&] {
      const auto high = member(folder, "high", 2, wait_ns);
      (void)high->enter(kGroup, kBytes);
      ready[0].store(true);
      for (; busy; sleep_for(kMs)) high->leave(high->enter(kGroup, kBytes));
      pause();
    });
    while (!ready[0].load()) sleep_for(kMs / 10);
    const LinkGate::Waits before = own->waits();
    const int64_t begin = monotonic_ns(), until = begin + seconds * 1000 * kMs;
    int operations = 0;
    int64_t longest = 0;
    for (; monotonic_ns() < until; ++operations) {
      const int64_t own_begin = own_time_ns();
      const uint64_t ticket = own->enter(kGroup, kBytes);
      longest = std::max(longest, own_time_ns() - own_begin);
      sleep_for(kOperation);
      own->leave(ticket);
    }
    const LinkGate::Waits after = own->waits();
    const double waited = static_cast<double>(after.total_ns - before.total_ns);
    end(holder, SIGKILL);
    std::printf(
        "{\"operations\": %d, \"waits\": %llu, \"ran_out\": %llu, \"share\": %.4f, "
        "\"longest_ms\": %.3f}",
        operations, static_cast<unsigned long long>(after.count - before.count),
        static_cast<unsigned long long>(after.ran_out - before.ran_out),
        waited / static_cast<double>(monotonic_ns() - begin), static_cast<double>(longest) / 1e6);
  };
  std::printf("{\"bound_ms\": %.1f, \"exempt_waits\": %lld, \"hung\": ", wait_ns / 1e6,
              static_cast<long long>(LinkGate::kExemptWaits));
  run(false);
  sleep_for((LinkGate::kExemptWaits + 1) * wait_ns);
  std::printf(", \"always busy\": ");
  run(true);
  std::printf("}\n");
}

// Storms of kills and halts, and after each a calm: what a storm has locked up for good stays so,
// and is found because somebody completes nothing any more.
class Soak {
 public:
  Soak(int64_t wait_ns, size_t processes, unsigned seed)
      : wait_ns_(wait_ns), seed_(seed), random_(seed), progress_(processes), children_(processes) {
    for (size_t slot = 0; slot < processes; ++slot) start(slot);
  }
  ~Soak() {
    for (const Child& child : children_) end(child.pid, SIGKILL);
  }
  Soak(const Soak&) = delete;
  Soak& operator=(const Soak&) = delete;

  void storm() {
    const int64_t until = monotonic_ns() + kStorm;
    while (monotonic_ns() < until) {
      sleep_for(static_cast<int64_t>(random_() % 20) * kMs);
      const size_t slot = random_() % children_.size();
      if (random_() % 4 == 0 && children_[slot].halted_until_ns == 0) {
        halt(slot, static_cast<int64_t>(random_() % 1000) * kMs);
      } else if (random_() % 2 == 0) {
        kill_and_start(slot);
      }
      for (size_t i = 0; i < children_.size(); ++i) {
        if (monotonic_ns() >= children_[i].halted_until_ns) let_go(i);
      }
    }
  }

  void calm() {
    for (size_t slot = 0; slot < children_.size(); ++slot) let_go(slot);
    std::vector<uint64_t> before;
    for (size_t i = 0; i < children_.size(); ++i) before.push_back(progress_[i].operations.load());
    const int64_t begin = monotonic_ns();
    // Two operations: the first may have been under way.
    const auto silent = [&](size_t i) { return progress_[i].operations.load() < before[i] + 2; };
    for (size_t i = 0; i < children_.size(); ++i) {
      while (silent(i) && monotonic_ns() - begin < kPatience) sleep_for(kMs);
      if (silent(i)) {
        ++deadlocks;
        kill_and_start(i);
      }
    }
    slowest_calm_ns = std::max(slowest_calm_ns, monotonic_ns() - begin);
    ++calms;
  }

  uint64_t operations() const {
    uint64_t sum = 0;
    for (size_t i = 0; i < children_.size(); ++i) sum += progress_[i].operations.load();
    return sum;
  }
  int64_t longest_wait_ns() const {
    int64_t longest = 0;
    for (size_t i = 0; i < children_.size(); ++i) {
      longest = std::max(longest, progress_[i].longest_ns.load());
    }
    return longest;
  }
  // A place or a rank that the dead have kept, once everybody is dead.
  void bury(size_t& places_lost, size_t& hindered) {
    for (const Child& child : children_) end(child.pid, SIGKILL);
    children_.clear();
    for (int link = 0; link < kLinks; ++link) {
      std::vector<std::unique_ptr<LinkTable>> tables;
      try {
        for (size_t i = 0; i <= LinkTable::kPlaces; ++i) {
          tables.push_back(std::make_unique<LinkTable>(folder_.path, "c", name(link), i + 1));
        }
      } catch (const std::runtime_error&) {
        // One more than there are.
      }
      places_lost += LinkTable::kPlaces - tables.size();
      tables.front()->set_rank(LinkTable::rank_at(0, 0.0));
      hindered += tables.front()->hindered(wait_ns_);
    }
  }

  static constexpr int kLinks = 3;
  uint64_t kills = 0, kills_of_halted = 0, halts = 0, calms = 0, deadlocks = 0;
  int64_t slowest_calm_ns = 0;

 private:
  static constexpr int kLevels = 5, kJobs = 7;
  static constexpr int64_t kStorm = 4'000 * kMs, kPatience = 30'000 * kMs;
  struct Child {
    pid_t pid = 0;
    int64_t halted_until_ns = 0;
  };

  static std::string name(int link) { return "link" + std::to_string(link); }

  void start(size_t slot) {
    const unsigned number = started_++;
    children_[slot] = {fork_to([this, slot, number] { live(slot, number); }), 0};
  }

  [[noreturn]] void live(size_t slot, unsigned number) {
    std::minstd_rand random(seed_ * 1000003 + number);
    const std::string job = "job" + std::to_string(number % kJobs);
    LinkGate own;
    std::vector<size_t> joined;
    for (int i = 0; i < kLinks; ++i) joined.push_back(own.join(folder_.path, "c", name(i), job));
    own.set_wait_ns(wait_ns_);
    own.cross(kGroup, joined);
    for (;;) {
      if (random() % 32 == 0) own.set_level(static_cast<int>(random() % kLevels));
      if (random() % 32 == 0) {
        std::vector<size_t> route(joined);
        std::shuffle(route.begin(), route.end(), random);
        route.resize(1 + random() % kLinks);
        own.cross(kGroup, route);
      }
      const uint64_t ticket = progress_[slot].enter(own);
      if (random() % 4 == 0) sleep_for(static_cast<int64_t>(random() % 2000) * 1000);
      own.leave(ticket);
      progress_[slot].left(own);
      if (random() % 2 == 0) sleep_for(static_cast<int64_t>(random() % 4000) * 1000);
    }
  }

  void halt(size_t slot, int64_t for_ns) {
    progress_[slot].halts.fetch_add(1);
    require(kill(children_[slot].pid, SIGSTOP) == 0, "kill");
    children_[slot].halted_until_ns = monotonic_ns() + for_ns;
    ++halts;
  }

  void let_go(size_t slot) {
    if (children_[slot].halted_until_ns == 0) return;
    progress_[slot].halts.fetch_add(1);
    require(kill(children_[slot].pid, SIGCONT) == 0, "kill");
    children_[slot].halted_until_ns = 0;
  }

  void kill_and_start(size_t slot) {
    kills_of_halted += children_[slot].halted_until_ns != 0;
    // Nobody ends by itself: a failed check in a child is seen here.
    int status = 0;
    require(kill(children_[slot].pid, SIGKILL) == 0, "kill");
    require(waitpid(children_[slot].pid, &status, 0) == children_[slot].pid, "waitpid");
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
      throw std::runtime_error("a process ended by itself");
    }
    ++kills;
    start(slot);
  }

  const int64_t wait_ns_;
  const unsigned seed_;
  const Folder folder_;
  std::minstd_rand random_;
  const Shared<Progress> progress_;
  std::vector<Child> children_;
  unsigned started_ = 0;
};

void soak(int64_t seconds, int64_t wait_ns, size_t processes, unsigned seed) {
  Soak soak(wait_ns, processes, seed);
  const int64_t until = monotonic_ns() + seconds * 1000 * kMs;
  while (monotonic_ns() < until) {
    soak.storm();
    soak.calm();
  }
  const uint64_t operations = soak.operations();
  const int64_t longest_wait_ns = soak.longest_wait_ns();
  size_t places_lost = 0, hindered = 0;
  soak.bury(places_lost, hindered);
  std::printf(
      "{\"seconds\": %lld, \"processes\": %zu, \"links\": %d, \"bound_ms\": %.1f, "
      "\"operations\": %llu, \"kills\": %llu, \"kills_of_halted\": %llu, \"halts\": %llu, "
      "\"calms\": %llu, \"slowest_calm_ms\": %.3f, \"deadlocks\": %llu, "
      "\"longest_wait_ms\": %.3f, \"places_lost\": %zu, \"hindered_by_the_dead\": %zu}\n",
      static_cast<long long>(seconds), processes, Soak::kLinks, wait_ns / 1e6,
      static_cast<unsigned long long>(operations), static_cast<unsigned long long>(soak.kills),
      static_cast<unsigned long long>(soak.kills_of_halted),
      static_cast<unsigned long long>(soak.halts), static_cast<unsigned long long>(soak.calms),
      static_cast<double>(soak.slowest_calm_ns) / 1e6,
      static_cast<unsigned long long>(soak.deadlocks), static_cast<double>(longest_wait_ns) / 1e6,
      places_lost, hindered);
}

int run(const std::vector<std::string>& args) {
  const auto number = [&](size_t at) { return std::stoll(args.at(at)); };
  const std::string command = args.at(0);
  if (command == "cost") {
    cost(static_cast<int>(number(1)));
  } else if (command == "contend") {
    contend(number(1), number(2) * kMs, number(3) != 0, static_cast<size_t>(number(4)));
  } else if (command == "death") {
    death(static_cast<int>(number(1)), number(2) * kMs);
  } else if (command == "hang") {
    hang(number(1), number(2) * kMs);
  } else if (command == "soak") {
    soak(number(1), number(2) * kMs, static_cast<size_t>(number(3)),
         static_cast<unsigned>(number(4)));
  } else {
    throw std::invalid_argument("no such command: " + command);
  }
  return 0;
}

}  // namespace
}  // namespace crux

int main(int count, char** words) {
  try {
    return crux::run({words + 1, words + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "links_driver: %s\n", error.what());
    return 2;
  }
}
