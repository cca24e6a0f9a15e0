// The semaphores of a host's links: who gives way to whom, for how long, and that no death, file or
// fork leaves anybody waiting. Each LinkGate here stands for a process of its own, for locks belong
// to the descriptor; where a death matters it is one.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/links/link_gate.h"
#include "../../csrc/process.h"
#include "check.h"

namespace crux {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kLong = 60'000 * kMs;
constexpr uint32_t kGroup = 0;
constexpr int64_t kBytes = 1 << 20;

struct Folder {
  Folder() {
    std::string name = "/tmp/crux-links-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  size_t files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path), {}));
  }
  std::string file(const std::string& link) const { return LinkFile::path_of(path, "c", link); }
  std::string path;
};

// A process of a job.
struct Process {
  Process(const Folder& folder, const std::string& job, int level, int64_t wait_ns = kLong,
          const std::vector<std::string>& links = {"a"}) {
    std::vector<size_t> joined;
    for (const auto& link : links) joined.push_back(gate.join(folder.path, "c", link, job));
    gate.cross(kGroup, joined);
    gate.set_level(level);
    gate.set_wait_ns(wait_ns);
  }
  ~Process() { gate.retire(); }
  uint64_t enter() { return gate.enter(kGroup, kBytes); }
  void leave(uint64_t ticket) { gate.leave(ticket); }
  // Whether an operation passes at once.
  bool passes() {
    const uint64_t before = gate.waits().count;
    const uint64_t ticket = enter();
    leave(ticket);
    return gate.waits().count == before;
  }
  LinkGate gate;
};

// An operation that is issued on a thread of its own.
struct Waiter {
  explicit Waiter(Process& process) {
    thread = std::thread([this, &process] {
      ticket = process.enter();
      passed.store(true);
    });
  }
  ~Waiter() { thread.join(); }
  bool waits_for(milliseconds time) const {
    std::this_thread::sleep_for(time);
    return !passed.load();
  }
  void pass() const {
    while (!passed.load()) std::this_thread::sleep_for(milliseconds(1));
  }
  std::thread thread;
  uint64_t ticket = 0;
  std::atomic<bool> passed{false};
};

// On the first link of a process, those that wait included.
uint32_t operations(Process& process) {
  uint32_t count = 0;
  for (const Holder& holder : process.gate.holders(0)) count += holder.operations;
  return count;
}

void until_operations(Process& process, uint32_t count) {
  while (operations(process) != count) std::this_thread::sleep_for(milliseconds(1));
}

void who_gives_way() {
  const Folder folder;
  Process high(folder, "high", 5), low(folder, "low", 2), equal(folder, "equal", 2);
  Process outside(folder, "outside", -1), sibling(folder, "high", 1);
  CHECK(low.passes());
  const uint64_t first = low.enter();
  CHECK(high.passes() && equal.passes() && outside.passes());
  low.leave(first);

  const uint64_t held = high.enter();
  CHECK(high.passes() && outside.passes());
  CHECK(sibling.passes());  // of the same job, whose ranks learn of a level one after the other
  CHECK(low.gate.enter(kGroup, 0) == 0);
  CHECK(low.gate.enter(kGroup + 1, kBytes) == 0);
  {
    Waiter waiting(low);
    until_operations(high, 2);
    CHECK(waiting.waits_for(milliseconds(30)));
    high.leave(held);
    waiting.pass();
    low.leave(waiting.ticket);
  }
  CHECK(low.gate.waits().count == 1 && low.gate.waits().ran_out == 0);
  CHECK(low.gate.waits().longest_ns > 20 * kMs);
  CHECK(operations(low) == 0);
  low.leave(0);
  CHECK(operations(low) == 0);
}

void the_order_of_ranks() {
  const double priorities[] = {-1.0, 1e-30, 0.5, 1.0, 1.0001, 3e12, 3.001e12, 1e300};
  uint32_t last = 0;
  for (int level = -1; level < 64; ++level) {
    for (const double priority : priorities) {
      const uint32_t rank = LinkTable::rank_at(level, priority);
      CHECK(level < 0 ? rank == 0 : rank > last);
      last = rank;
    }
  }
  CHECK(LinkTable::rank_at(3, 0.0) == LinkTable::rank_at(3, -1.0));
  const Folder folder;
  Process one(folder, "one", 3), other(folder, "other", 3);
  one.gate.set_level(3, 2.0);
  other.gate.set_level(3, 1.0);
  const uint64_t held = other.enter();
  CHECK(one.passes());
  other.leave(held);
  const uint64_t first = one.enter();
  Waiter waiting(other);
  until_operations(one, 2);
  one.leave(first);
  waiting.pass();
  other.leave(waiting.ticket);
  CHECK(other.gate.waits().count == 1);
  CHECK(one.gate.holders(0)[0].level == 3);
}

void a_level_changes_live() {
  const Folder folder;
  Process high(folder, "high", 5), low(folder, "low", 2);
  const uint64_t held = high.enter();
  {
    Waiter waiting(low);
    CHECK(waiting.waits_for(milliseconds(20)));
    high.gate.set_level(1);
    waiting.pass();
    low.leave(waiting.ticket);
  }
  high.gate.set_level(5);
  {
    Waiter waiting(low);
    CHECK(waiting.waits_for(milliseconds(20)));
    low.gate.set_level(6);
    waiting.pass();
    low.leave(waiting.ticket);
  }
  low.gate.set_level(2);
  {
    Waiter waiting(low);
    CHECK(waiting.waits_for(milliseconds(20)));
    high.gate.retire();
    waiting.pass();
    low.leave(waiting.ticket);
  }
  high.leave(held);
  CHECK(operations(low) == 0);
}

// One that waits is before a lower one when the highest leaves.
void the_order_of_those_that_wait() {
  const Folder folder;
  Process high(folder, "high", 5), middle(folder, "middle", 3), low(folder, "low", 1);
  for (int round = 0; round < 20; ++round) {
    const uint64_t held = high.enter();
    Waiter lowest(low), next(middle);
    until_operations(high, 3);  // one in flight and two that wait
    high.leave(held);
    next.pass();
    CHECK(lowest.waits_for(milliseconds(2)));
    middle.leave(next.ticket);
    lowest.pass();
    low.leave(lowest.ticket);
  }
  CHECK(operations(low) == 0);
}

void several_links() {
  const Folder folder;
  Process on_a(folder, "one", 5, kLong, {"a"}), on_b(folder, "two", 5, kLong, {"b"});
  Process both(folder, "both", 2, kLong, {"b", "a"}), low(folder, "low", 1, kLong, {"a"});
  const uint64_t a = on_a.enter(), b = on_b.enter();
  Waiter waiting(both);
  until_operations(on_a, 2);
  on_a.leave(a);
  until_operations(on_b, 2);
  until_operations(on_a, 0);  // what waits for b holds nothing else
  CHECK(low.passes());
  on_b.leave(b);
  waiting.pass();
  CHECK(operations(on_a) == 1 && operations(on_b) == 1);
  both.leave(waiting.ticket);
  CHECK(operations(low) == 0 && operations(on_b) == 0);
}

// A job that hinders without end costs one wait out of each round, and one that gives no sign of
// life any more costs one wait altogether.
void a_wait_is_bounded() {
  const Folder folder;
  constexpr int64_t kWait = 150 * kMs;
  Process high(folder, "high", 5), low(folder, "low", 2, kWait), sibling(folder, "low", 2, kWait);
  const uint64_t hung = high.enter();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) {
      high.leave(high.enter());
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  // Again where the busy one had no core for as long as a wait, and so gave no sign of life.
  const auto run_out = [&low](uint64_t count) {
    while (low.gate.waits().ran_out < count) low.leave(low.enter());
  };
  run_out(1);
  CHECK(low.gate.waits().longest_ns >= kWait);
  CHECK(low.passes() && sibling.passes());  // exempt, the whole job
  std::this_thread::sleep_for(std::chrono::nanoseconds((LinkGate::kExemptWaits + 1) * kWait));
  run_out(2);
  stop.store(true);
  busy.join();
  std::this_thread::sleep_for(std::chrono::nanoseconds((LinkGate::kExemptWaits + 2) * kWait));
  CHECK(low.passes());  // hung for longer than anybody waits
  high.leave(hung);
}

pid_t fork_to(const std::function<void()>& run) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    run();
    std::_Exit(0);
  }
  return pid;
}

void end(pid_t pid, int signal) {
  CHECK(kill(pid, signal) == 0);
  CHECK(waitpid(pid, nullptr, 0) == pid);
}

void a_holder_dies() {
  const Folder folder;
  Process low(folder, "low", 2), other(folder, "other", 2);
  for (int round = 0; round < 3; ++round) {
    int ready[2];
    CHECK(pipe(ready) == 0);
    const pid_t holder = fork_to([&] {
      Process high(folder, "high", 5);
      CHECK(high.enter() != 0);
      CHECK(write(ready[1], "x", 1) == 1);
      pause();
    });
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    CHECK(low.gate.shared(0));
    // Threads after the fork only: sanitizers can't follow both.
    std::thread killer([&low, holder] {
      until_operations(low, 2);
      end(holder, SIGKILL);
    });
    low.leave(low.enter());
    killer.join();
    CHECK(low.gate.waits().count == static_cast<uint64_t>(round) + 1);
    CHECK(low.gate.waits().ran_out == 0);
    CHECK(low.passes());
    CHECK(low.gate.holders(0).size() == 2);
    CHECK(operations(low) == 0);
  }
}

void a_fork_takes_nothing_along() {
  const Folder folder;
  LinkGate& gate = LinkGate::process();
  const size_t link = gate.join(folder.path, "c", "a", "job");
  gate.cross(kGroup, {link});
  gate.set_level(2);
  set_gate(&gate);
  const uint64_t ticket = gate.enter(kGroup, kBytes);
  int ready[2];
  CHECK(pipe(ready) == 0);
  const pid_t copy = fork_to([&] {
    CHECK(crux::gate() == nullptr);
    gate.leave(ticket);
    CHECK(gate.enter(kGroup, kBytes) == 0);
    CHECK(&LinkGate::process() != &gate);
    CHECK(write(ready[1], "x", 1) == 1);
    pause();
  });
  char byte;
  CHECK(read(ready[0], &byte, 1) == 1);
  close(ready[0]);
  close(ready[1]);
  CHECK(gate.holders(link)[0].operations == 1);
  gate.leave(ticket);
  // The parent's place is free at its end though the child lives.
  Process other(folder, "other", 1);
  CHECK(other.gate.shared(0));
  gate.retire();
  CHECK(!other.gate.shared(0));
  set_gate(nullptr);
  end(copy, SIGKILL);
}

// Sanitizers can't follow a fork among threads.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define CRUX_FORKS_AMONG_THREADS
bool has_open(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone).string().find(folder) == 0) return true;
  }
  return false;
}

// A worker that is forked while another thread takes a place or gives it back must not keep the
// place from its parent's death.
void a_fork_while_a_place_is_taken() {
  const Folder folder;
  (void)LinkGate::process();  // from then on forks are noticed
  std::atomic<bool> done{false};
  std::thread joiner([&] {
    while (!done.load()) LinkTable(folder.path, "c", "a", 1);
  });
  int kept = 0;
  for (int i = 0; i < 300; ++i) {
    const pid_t copy = fork();
    CHECK(copy >= 0);
    if (copy == 0) std::_Exit(has_open(folder.path));
    int status = 0;
    CHECK(waitpid(copy, &status, 0) == copy);
    kept += WEXITSTATUS(status);
  }
  done = true;
  joiner.join();
  CHECK(kept == 0);
}
#endif

bool refused(const Folder& folder, const std::string& link, const std::string& because) {
  LinkGate gate;
  try {
    gate.join(folder.path, "c", link, "job");
  } catch (const std::runtime_error& error) {
    const std::string said = error.what();
    CHECK(said.find(because) != std::string::npos);
    return true;
  }
  return false;
}

void foreign_files_are_refused() {
  const Folder folder;
  std::ofstream(folder.file("mode")) << "";
  CHECK(chmod(folder.file("mode").c_str(), 0644) == 0);
  CHECK(refused(folder, "mode", "mode isn't 0600"));

  std::ofstream(folder.file("size")) << "short";
  CHECK(chmod(folder.file("size").c_str(), 0600) == 0);
  CHECK(refused(folder, "size", "has 5 bytes"));

  std::ofstream(folder.file("layout")) << std::string(8192, 'x');
  CHECK(chmod(folder.file("layout").c_str(), 0600) == 0);
  CHECK(refused(folder, "layout", "another layout"));

  CHECK(symlink("/etc/passwd", folder.file("symlink").c_str()) == 0);
  CHECK(refused(folder, "symlink", "open: "));
  CHECK(mkfifo(folder.file("fifo").c_str(), 0600) == 0);
  CHECK(refused(folder, "fifo", "not a regular file"));
  CHECK(::link(folder.file("layout").c_str(), folder.file("other").c_str()) == 0);
  CHECK(refused(folder, "other", "other names"));
  CHECK(refused(folder, "a/b", "not a name"));
  if (geteuid() == 0) {
    std::ofstream(folder.file("owner")) << "";
    CHECK(chmod(folder.file("owner").c_str(), 0600) == 0);
    CHECK(chown(folder.file("owner").c_str(), 4242, 4242) == 0);
    CHECK(refused(folder, "owner", "belongs to user 4242"));
  }
  CHECK(chmod(folder.path.c_str(), 0701) == 0);
  CHECK(refused(folder, "mode", "is open to other users"));
  CHECK(chmod(folder.path.c_str(), 0700) == 0);
  // A file that whoever made it left empty is as good as none.
  std::ofstream(folder.file("empty")) << "";
  CHECK(chmod(folder.file("empty").c_str(), 0600) == 0);
  CHECK(!refused(folder, "empty", ""));
}

// In the folder of a group its members share the file, whoever made it.
void a_group_shares_its_folder() {
  const Folder folder;
  CHECK(chmod(folder.path.c_str(), 0770) == 0);
  Process one(folder, "one", 2);
  struct stat found{};
  CHECK(stat(folder.file("a").c_str(), &found) == 0);
  CHECK((found.st_mode & 07777) == 0660 && found.st_gid == getegid());
  if (geteuid() == 0) CHECK(chown(folder.file("a").c_str(), 4242, getegid()) == 0);
  Process two(folder, "two", 1);
  CHECK(two.gate.shared(0) && one.gate.shared(0));
  CHECK(chmod(folder.file("a").c_str(), 0600) == 0);
  CHECK(refused(folder, "a", "mode isn't 0660"));
  if (geteuid() == 0) {
    CHECK(chmod(folder.file("a").c_str(), 0660) == 0);
    CHECK(chown(folder.file("a").c_str(), 0, 4242) == 0);
    CHECK(refused(folder, "a", "is not its folder's group's"));
  }
}

void files_go_with_the_last() {
  const Folder folder;
  auto one = std::make_unique<Process>(folder, "one", 1);
  struct stat found{};
  CHECK(stat(folder.file("a").c_str(), &found) == 0);
  CHECK((found.st_mode & 07777) == 0600 && found.st_size == 8192);
  auto two = std::make_unique<Process>(folder, "two", 2);
  const uint64_t ticket = one->enter();
  one->gate.retire();
  CHECK(folder.files() == 1);
  two->gate.retire();
  CHECK(folder.files() == 0);
  one->leave(ticket);  // on the removed file
  CHECK(one->gate.join(folder.path, "c", "a", "again") == 1);
  CHECK(folder.files() == 1);
  CHECK(two->gate.join(folder.path, "c", "a", "two") == 1);
  CHECK(two->gate.shared(1));
  one->gate.retire();
  CHECK(!two->gate.shared(1));
  CHECK(one->gate.join(folder.path, "c", "a", "one") == 1);
  CHECK(two->gate.shared(1));
  one.reset();
  two.reset();
  CHECK(folder.files() == 0);
}

void a_full_table_refuses() {
  const Folder folder;
  std::vector<std::unique_ptr<LinkTable>> tables;
  for (size_t i = 0; i < LinkTable::kPlaces; ++i) {
    tables.push_back(std::make_unique<LinkTable>(folder.path, "c", "a", i + 1));
  }
  CHECK(refused(folder, "a", "all 127 places are taken"));
  tables[17].reset();
  CHECK(!refused(folder, "a", ""));
}

// Another program of the user may cut the file while it is mapped.
void a_file_that_is_cut() {
  const Folder folder;
  Process one(folder, "one", 2), two(folder, "two", 1);
  const uint64_t ticket = one.enter();
  CHECK(one.gate.shared(0));
  CHECK(truncate(folder.file("a").c_str(), 0) == 0);
  one.leave(ticket);
  two.leave(two.enter());
  for (Process* each : {&one, &two}) {
    CHECK(each->gate.lost(0));
    CHECK(!each->gate.shared(0));
    CHECK(each->gate.holders(0).empty());
  }
  CHECK(one.gate.join(folder.path, "c", "a", "one") == 1);
  CHECK(two.gate.join(folder.path, "c", "a", "two") == 1);
  CHECK(one.gate.shared(1) && two.gate.shared(1));
  CHECK(!one.gate.lost(1));
}

// A file that is not ours ends the process, as without the guard; and so does kill().
void a_fault_elsewhere_is_not_ours() {
  const Folder folder;
  const Process one(folder, "one", 2);
  for (const bool sent : {false, true}) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      if (sent) raise(SIGBUS);
      const int file = open((folder.path + "/other").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
      auto* const memory = static_cast<volatile char*>(
          mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
      memory[0] = 1;
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
  }
}

// Threads of several processes on two links, while levels change and processes come and go. Only
// wakes and looks lead on: no wait may run out.
void many_threads() {
  const Folder folder;
  constexpr int kProcesses = 6, kThreads = 2, kRounds = 400;
  std::vector<std::unique_ptr<Process>> processes;
  for (int i = 0; i < kProcesses; ++i) {
    const std::vector<std::string> links = i % 3 == 0   ? std::vector<std::string>{"a"}
                                           : i % 3 == 1 ? std::vector<std::string>{"b"}
                                                        : std::vector<std::string>{"a", "b"};
    processes.push_back(
        std::make_unique<Process>(folder, "job" + std::to_string(i), i % 4, kLong, links));
  }
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  for (int i = 0; i < kProcesses * kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::minstd_rand random(static_cast<unsigned>(i) + 1);
      Process& process = *processes[static_cast<size_t>(i) % processes.size()];
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t ticket = process.enter();
        CHECK(ticket != 0);
        if (random() % 4 == 0) std::this_thread::yield();
        process.leave(ticket);
      }
    });
  }
  std::thread changes([&] {
    std::minstd_rand random(99);
    while (!stop.load()) {
      processes[random() % processes.size()]->gate.set_level(static_cast<int>(random() % 5) - 1);
      Process passing(folder, "passing", 4);
      passing.leave(passing.enter());
      CHECK(processes[0]->gate.shared(0));
    }
  });
  for (auto& thread : threads) thread.join();
  stop.store(true);
  changes.join();
  for (auto& process : processes) {
    CHECK(process->gate.waits().ran_out == 0);
    CHECK(operations(*process) == 0);
  }
}

}  // namespace
}  // namespace crux

int main() {
  // A sanitizer has a handler of its own, which a_fault_elsewhere_is_not_ours() must not find.
  CHECK(signal(SIGBUS, SIG_DFL) != SIG_ERR);
  crux::a_fork_takes_nothing_along();
#ifdef CRUX_FORKS_AMONG_THREADS
  crux::a_fork_while_a_place_is_taken();
#endif
  crux::a_fault_elsewhere_is_not_ours();
  crux::a_holder_dies();
  crux::who_gives_way();
  crux::the_order_of_ranks();
  crux::a_level_changes_live();
  crux::the_order_of_those_that_wait();
  crux::several_links();
  crux::a_wait_is_bounded();
  crux::foreign_files_are_refused();
  crux::a_group_shares_its_folder();
  crux::files_go_with_the_last();
  crux::a_full_table_refuses();
  crux::a_file_that_is_cut();
  crux::many_threads();
  std::puts("links: ok");
}
