// What benchmarks/links.py measures, without Python and torch: the semaphores of a host's links
// (csrc/links) between real processes. Each command prints one line of JSON.
//
//   cost REPEATS                                     ns of enter and leave, by who else is there
//   contend SECONDS WAIT_MS GATE(0|1) LOWER          one job above LOWER others on one link
//   death ROUNDS WAIT_MS                             from a holder's death to the next operation
//   hang SECONDS WAIT_MS                             what a job that hangs costs a lower one
//   soak SECONDS WAIT_MS PROCESSES SEED              storms of kills and halts, and calms

#include <algorithm>
#include <random>
#include <stdexcept>

#include "links_processes.h"
#include "links_soak.h"

namespace crux {
namespace {

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
