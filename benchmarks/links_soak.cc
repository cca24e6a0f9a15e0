#include "links_soak.h"

#include <random>
#include <stdexcept>

#include "links_processes.h"

namespace crux {
namespace {

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

}  // namespace

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

}  // namespace crux
