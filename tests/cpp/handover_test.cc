// Where operations pass from one inner backend to the next, without torch: in every interleaving of
// issuing, holding, deciding and giving up, all ranks take the same one for the same operation.

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../../csrc/process_group/handover_point.h"
#include "check.h"

namespace crux {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{20000};

// An inner backend of one rank; it must not be used once it was closed.
struct Fake {
  explicit Fake(int number) : generation(number) {}
  ~Fake() { closed.store(true); }
  const int generation;
  std::atomic<bool> closed{false};
};

using Point = HandoverPoint<Fake>;

void rest() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

// What an operation is called by all ranks that take part in it: collectives with sender -1.
using Name = std::tuple<int, int, int, uint64_t>;  // sender, receiver, tag, number

// What one rank does, in its own order.
struct Operation {
  enum Kind { kCollective, kSend, kReceive } kind = kCollective;
  int peer = -1;
  int tag = 0;
};

// Where every rank's operations went. Two ranks that disagree about one of them fail at once.
class Log {
 public:
  void went(const Name& name, int generation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [found, first] = generation_.emplace(name, generation);
    CHECK(first || found->second == generation);
  }

 private:
  std::mutex mutex_;
  std::map<Name, int> generation_;
};

Counts decide(const std::vector<Counts>& holds) {
  Counts all;
  for (const Counts& hold : holds) {
    all.collectives = std::max(all.collectives, hold.collectives);
    all.transfers_stay |= hold.transfers_stay;
  }
  return all;
}

// The counts that `rank` follows: of each key the larger one of its two ends.
Counts for_rank(const std::vector<Counts>& holds, int rank) {
  Counts counts = decide(holds);
  const auto raise = [&](const Transfer& key, uint64_t count) {
    uint64_t& own = counts.transfers[key];
    own = std::max(own, count);
  };
  for (const auto& [key, count] : holds[rank].transfers) raise(key, count);
  for (int peer = 0; peer < static_cast<int>(holds.size()); ++peer) {
    for (const auto& [key, count] : holds[peer].transfers) {
      if (key.peer == rank) raise({peer, key.tag, !key.sends}, count);
    }
  }
  return counts;
}

// One rank, whose training and background steps the test interleaves on one thread.
class Rank {
 public:
  Rank(int rank, std::vector<Operation> program, uint64_t margin, Log& log)
      : rank_(rank), program_(std::move(program)), margin_(margin), log_(log) {}

  bool can_issue() const {
    if (done_ == program_.size()) return false;
    return !waiting_ || !holding_;
  }

  void issue() {
    const Operation& operation = program_[done_];
    if (waiting_) {
      waiting_->wait();
      finish_issue(operation, *waiting_);
      waiting_.reset();
      return;
    }
    Point::Ticket ticket =
        operation.kind == Operation::kCollective
            ? point_.collective()
            : point_.transfer({operation.peer, operation.tag, operation.kind == Operation::kSend});
    if (ticket.inner()) {
      finish_issue(operation, ticket);
    } else {
      CHECK(holding_);
      waiting_.emplace(std::move(ticket));
    }
  }

  bool can_hand_over(const std::vector<std::optional<Counts>>& holds,
                     const std::optional<bool>& verdict) const {
    if (!holding_) return !holds[rank_] && !verdict;
    bool all = true;
    for (const auto& hold : holds) all = all && hold;
    return verdict || all;
  }

  void step(std::vector<std::optional<Counts>>& holds, std::optional<bool>& verdict) {
    if (!holding_) {
      Counts hold;
      CHECK(point_.arm(std::make_shared<Fake>(1), margin_, kLong, &hold));
      holds[rank_] = hold;
      holding_ = true;
      return;
    }
    if (!verdict) verdict = true;
    holding_ = false;
    if (!*verdict) {
      CHECK(point_.cancel()->generation == 1);
      return;
    }
    std::vector<Counts> known;
    for (const auto& hold : holds) known.push_back(*hold);
    CHECK(point_.decide(for_rank(known, rank_)));
    std::shared_ptr<Fake> retired;
    if (point_.finish(&retired)) CHECK(retired->generation == 0);
  }

 private:
  void finish_issue(const Operation& operation, Point::Ticket& ticket) {
    CHECK(!ticket.inner()->closed.load());
    Name name{-1, -1, 0, collectives_};
    if (operation.kind == Operation::kCollective) {
      ++collectives_;
    } else {
      const bool sends = operation.kind == Operation::kSend;
      const uint64_t number = transfers_[{operation.peer, operation.tag, sends}]++;
      name = {sends ? rank_ : operation.peer, sends ? operation.peer : rank_, operation.tag,
              number};
    }
    log_.went(name, ticket.inner()->generation);
    ticket.issued();
    ++done_;
  }

  const int rank_;
  const std::vector<Operation> program_;
  const uint64_t margin_;
  Log& log_;
  Point point_{std::make_shared<Fake>(0)};
  std::optional<Point::Ticket> waiting_;
  size_t done_ = 0;
  uint64_t collectives_ = 0;
  std::map<Transfer, uint64_t> transfers_;
  bool holding_ = false;
};

using Programs = std::vector<std::vector<Operation>>;

// Runs one interleaving; `choose` picks one of n actions. Returns the number of steps.
size_t run(const Programs& programs, const std::vector<uint64_t>& margins, bool may_give_up,
           const std::function<size_t(size_t)>& choose) {
  Log log;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (size_t i = 0; i < programs.size(); ++i) {
    ranks.push_back(std::make_unique<Rank>(static_cast<int>(i), programs[i], margins[i], log));
  }
  std::vector<std::optional<Counts>> holds(programs.size());
  std::optional<bool> verdict;
  size_t steps = 0;
  for (;; ++steps) {
    std::vector<std::function<void()>> actions;
    for (auto& rank : ranks) {
      if (rank->can_issue()) {
        actions.emplace_back([&] { rank->issue(); });
      }
    }
    for (auto& rank : ranks) {
      if (rank->can_hand_over(holds, verdict)) {
        actions.emplace_back([&] { rank->step(holds, verdict); });
      }
    }
    if (may_give_up && !verdict) actions.emplace_back([&] { verdict = false; });
    if (actions.empty()) return steps;
    actions[choose(actions.size())]();
  }
}

// Every interleaving: choices are counted like the digits of a number.
size_t run_all(const Programs& programs, const std::vector<uint64_t>& margins, bool may_give_up) {
  std::vector<std::pair<size_t, size_t>> choices;  // taken, of
  size_t runs = 0;
  for (;;) {
    size_t depth = 0;
    run(programs, margins, may_give_up, [&](size_t n) {
      if (depth == choices.size()) choices.emplace_back(0, n);
      CHECK(choices[depth].second == n);
      return choices[depth++].first;
    });
    ++runs;
    while (!choices.empty() && choices.back().first + 1 == choices.back().second) {
      choices.pop_back();
    }
    if (choices.empty()) return runs;
    ++choices.back().first;
  }
}

constexpr Operation kC{};
Operation send(int peer, int tag = 0) { return {Operation::kSend, peer, tag}; }
Operation receive(int peer, int tag = 0) { return {Operation::kReceive, peer, tag}; }

void ranks_never_part_in_any_interleaving() {
  size_t runs = run_all({{kC, kC, kC}, {kC, kC, kC}}, {0, 0}, false);
  runs += run_all({{kC, kC, kC}, {kC, kC}}, {1, 0}, false);
  runs += run_all({{kC}, {kC}, {kC}}, {0, 1, 0}, false);
  runs += run_all({{kC, kC}, {kC, kC}}, {0, 1}, true);
  runs += run_all({{send(1), send(1)}, {receive(0), receive(0)}}, {0, 0}, false);
  runs += run_all({{send(1), kC}, {kC, receive(0)}}, {0, 2}, false);
  runs += run_all({{send(1, 4), receive(1, 5)}, {send(0, 5), receive(0, 4)}}, {0, 0}, false);
  CHECK(runs > 10000);
}

void more_ranks_never_part_in_random_interleavings() {
  std::mt19937 random(3);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (int round = 0; round < 3000; ++round) {
    const size_t size = 2 + below(3);
    Programs programs(size);
    std::vector<uint64_t> margins;
    for (size_t rank = 0; rank < size; ++rank) margins.push_back(below(4));
    for (int i = 0; i < 12; ++i) {
      if (below(2) == 0) {
        for (auto& program : programs) program.push_back(kC);
        continue;
      }
      const int from = static_cast<int>(below(size));
      const int to = static_cast<int>((from + 1 + below(size - 1)) % size);
      const int tag = static_cast<int>(below(2));
      programs[from].push_back(send(to, tag));
      // Some are received later, or never.
      if (below(4) != 0) programs[to].push_back(receive(from, tag));
    }
    run(programs, margins, below(3) == 0, below);
  }
}

// Real threads: each rank trains on one, sends on another, and hands over on a third.
void threads_hand_over_many_times(int size, int handovers) {
  struct Board {
    std::mutex mutex;
    std::vector<std::optional<Counts>> holds;
    std::optional<bool> verdict;
  };
  std::vector<Board> boards(handovers);
  for (Board& board : boards) board.holds.resize(size);
  Log log;
  std::vector<std::unique_ptr<Point>> points;
  for (int rank = 0; rank < size; ++rank) {
    points.push_back(std::make_unique<Point>(std::make_shared<Fake>(0)));
  }
  std::atomic<int> moving{size};
  std::atomic<int> moved{0};
  // No rank is further ahead of another than it could be in a job.
  std::vector<std::atomic<uint64_t>> issued(size);
  std::vector<std::thread> threads;
  const auto serve = [&](Point::Ticket& ticket, const Name& name) {
    if (!ticket.inner()) ticket.wait();
    CHECK(ticket.inner() && !ticket.inner()->closed.load());
    log.went(name, ticket.inner()->generation);
    ticket.issued();
  };
  for (int rank = 0; rank < size; ++rank) {
    Point& point = *points[rank];
    threads.emplace_back([&, rank] {
      for (uint64_t number = 0; moving.load() > 0; ++number) {
        for (int other = 0; other < size; ++other) {
          while (issued[other].load() + 5 < number && moving.load() > 0) rest();
        }
        Point::Ticket ticket = point.collective();
        // Refused now and then: the next has the same number.
        if (number % 7 == 3 && ticket.inner() && rank % 2 == 0) {
          {
            const Point::Ticket refused = std::move(ticket);
          }
          Point::Ticket again = point.collective();
          serve(again, {-1, -1, 0, number});
        } else {
          serve(ticket, {-1, -1, 0, number});
        }
        issued[rank].store(number + 1);
      }
    });
    threads.emplace_back([&, rank] {
      const int to = (rank + 1) % size;
      const int from = (rank + size - 1) % size;
      uint64_t number = 0;
      while (moving.load() > 0) {
        Point::Ticket out = point.transfer({to, 0, true});
        serve(out, {rank, to, 0, number});
        Point::Ticket in = point.transfer({from, 0, false});
        serve(in, {from, rank, 0, number});
        ++number;
        if (number % 16 == 0) rest();
      }
    });
    threads.emplace_back([&, rank] {
      std::mt19937 random(rank);
      std::shared_ptr<Fake> retired;
      for (int number = 0; number < handovers; ++number) {
        Board& board = boards[number];
        Counts hold;
        CHECK(point.arm(std::make_shared<Fake>(number + 1), random() % 3, kLong, &hold));
        {
          const std::lock_guard<std::mutex> lock(board.mutex);
          board.holds[rank] = hold;
        }
        std::optional<bool> verdict;
        std::vector<Counts> holds;
        const bool gives_up = random() % 8 == 0;
        while (!verdict) {
          rest();
          const std::lock_guard<std::mutex> lock(board.mutex);
          bool all = true;
          for (const auto& one : board.holds) all = all && one.has_value();
          if (!board.verdict && gives_up) board.verdict = false;
          if (!board.verdict && all && rank == 0) board.verdict = true;
          verdict = board.verdict;
          if (verdict && *verdict) {
            for (const auto& one : board.holds) holds.push_back(*one);
          }
        }
        if (!*verdict) {
          CHECK(point.cancel() != nullptr);
          continue;
        }
        CHECK(point.decide(for_rank(holds, rank)));
        while (!point.finish(&retired)) rest();
        CHECK(retired && retired->generation <= number);
        retired.reset();
        if (rank == 0) moved.fetch_add(1);
      }
      moving.fetch_sub(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(moved.load() > handovers / 2);
}

// One rank whose background looks all the time whether it has passed, while training issues and is
// refused: no operation below a count may slip past the look.
void nobody_slips_past_the_look(int handovers) {
  Point point(std::make_shared<Fake>(0));
  std::vector<int> went;
  std::atomic<bool> over{false};
  std::thread training([&] {
    std::mt19937 random(1);
    while (!over.load()) {
      Point::Ticket ticket = point.collective();
      if (!ticket.inner()) ticket.wait();
      if (random() % 4 == 0) continue;  // refused: the next has its number
      went.push_back(ticket.inner()->generation);
      ticket.issued();
    }
  });
  std::vector<uint64_t> counts;
  // Kept, so that an operation that went astray is told by where it went.
  std::vector<std::shared_ptr<Fake>> retired;
  for (int number = 1; number <= handovers; ++number) {
    Counts hold;
    CHECK(point.arm(std::make_shared<Fake>(number), 2, kLong, &hold));
    counts.push_back(hold.collectives);
    CHECK(point.decide(hold));
    retired.emplace_back();
    while (!point.finish(&retired.back())) {
    }
  }
  over.store(true);
  training.join();
  int generation = 0;
  for (uint64_t number = 0; number < went.size(); ++number) {
    while (generation < handovers && counts[generation] <= number) ++generation;
    CHECK(went[number] == generation);
  }
}

void who_waits_too_long_goes_on_as_before() {
  Point point(std::make_shared<Fake>(0));
  Counts hold;
  CHECK(point.arm(std::make_shared<Fake>(1), 1, milliseconds(20), &hold));
  CHECK(hold.collectives == 1);
  {
    Point::Ticket first = point.collective();
    CHECK(first.inner()->generation == 0);
    first.issued();
  }
  Point::Ticket second = point.collective();
  CHECK(!second.inner());
  second.wait();
  CHECK(second.inner()->generation == 0);
  second.issued();
  CHECK(!point.armed());
  CHECK(point.waits().count == 1 && point.waits().longest >= milliseconds(20));
  CHECK(!point.decide({1, {}, false}));
  // The next backend is still held for whoever handovers, and no other handover begins before.
  CHECK(!point.arm(std::make_shared<Fake>(2), 0, kLong, &hold));
  CHECK(point.cancel()->generation == 1);
  CHECK(point.arm(std::make_shared<Fake>(2), 0, kLong, &hold));
  CHECK(hold.collectives == 2);
}

// Ranks stop at one collective, each in a thread. Whoever comes too late finds that it was given
// up.
void ranks_stop_where_the_next_one_is_made(int size, int handovers, bool give_up) {
  std::vector<std::unique_ptr<Point>> points;
  std::vector<std::vector<int>> went(size);
  std::atomic<bool> over{false};
  std::vector<std::thread> training;
  for (int rank = 0; rank < size; ++rank) {
    points.push_back(std::make_unique<Point>(std::make_shared<Fake>(0)));
    training.emplace_back([&point = *points.back(), &went = went[rank], &over] {
      while (!over.load()) {
        {
          Point::Ticket message = point.transfer({0, 0, true});
          if (!message.inner()) message.wait();
          CHECK(!message.inner()->closed.load());
          message.issued();
        }
        Point::Ticket ticket = point.collective();
        if (!ticket.inner()) ticket.wait();
        CHECK(!ticket.inner()->closed.load());
        went.push_back(ticket.inner()->generation);
        ticket.issued();
      }
    });
  }
  int generation = 0;
  for (int i = 1; i <= handovers; ++i) {
    Counts decided;
    for (auto& point : points) {
      Counts hold;
      CHECK(point->arm(nullptr, 3, kLong, &hold));
      decided.collectives = std::max(decided.collectives, hold.collectives);
    }
    for (auto& point : points) CHECK(point->decide(decided));
    for (auto& point : points) {
      while (!point->stopped()) rest();
      CHECK(point->collectives() == decided.collectives + 1);
    }
    if (give_up && i % 2 == 0) {
      for (auto& point : points) CHECK(!point->cancel());
      for (auto& point : points) CHECK(!point->replace(std::make_shared<Fake>(-1), nullptr));
      continue;
    }
    for (auto& point : points) {
      std::shared_ptr<Fake> retired;
      CHECK(point->replace(std::make_shared<Fake>(generation + 1), &retired));
      CHECK(retired->generation == generation && retired.use_count() == 1);
      CHECK(point->collectives() == decided.collectives + 1);
    }
    ++generation;
    for (auto& point : points) CHECK(!point->cancel());
  }
  over.store(true);
  for (auto& thread : training) thread.join();
  for (int rank = 1; rank < size; ++rank) {
    const size_t both = std::min(went[0].size(), went[rank].size());
    CHECK(std::equal(went[0].begin(), went[0].begin() + both, went[rank].begin()));
  }
}

void who_stops_for_too_long_goes_on() {
  Point point(std::make_shared<Fake>(0));
  Counts hold;
  CHECK(point.arm(nullptr, 0, milliseconds(20), &hold));
  CHECK(point.decide(hold));
  CHECK(!point.stopped());
  Point::Ticket before = point.collective();
  before.wait();
  CHECK(before.inner()->generation == 0 && !point.armed() && !point.stopped());
  before.issued();
  std::shared_ptr<Fake> retired;
  CHECK(!point.replace(std::make_shared<Fake>(1), &retired));
  CHECK(!point.cancel());
  CHECK(point.arm(nullptr, 0, milliseconds(20), &hold));
}

void transfers_stay_where_anybody_may_be_the_source() {
  Point point(std::make_shared<Fake>(0));
  {
    point.any_source(3).issued();
  }
  Counts hold;
  CHECK(point.arm(std::make_shared<Fake>(1), 0, kLong, &hold));
  CHECK(hold.transfers_stay);
  CHECK(point.transfer({1, 0, true}).inner()->generation == 0);
  CHECK(point.decide(hold));
  std::shared_ptr<Fake> retired;
  CHECK(point.finish(&retired));
  // Still in use.
  CHECK(!retired);
  CHECK(point.transfer({1, 0, true}).inner()->generation == 0);
  CHECK(point.any_source(3).inner()->generation == 0);
  CHECK(point.collective().inner()->generation == 1);
  CHECK(point.in_use().size() == 2);
  CHECK(point.arm(std::make_shared<Fake>(2), 0, kLong, &hold));
  CHECK(point.decide(hold));
  CHECK(point.finish(&retired));
  CHECK(retired && retired->generation == 1);
  CHECK(point.transfer({1, 0, false}).inner()->generation == 0);
}

void first_receive_from_anybody_after_the_decision_takes_what_was_sent_before() {
  Point point(std::make_shared<Fake>(0));
  Counts hold;
  CHECK(point.arm(std::make_shared<Fake>(1), 0, kLong, &hold));
  // Rank 1 has sent one message that is not received yet.
  CHECK(point.decide({0, {{{1, 3, false}, 1}}, false}));
  std::shared_ptr<Fake> retired;
  CHECK(!point.finish(&retired));
  {
    Point::Ticket ticket = point.any_source(3);
    CHECK(ticket.inner()->generation == 0);
    ticket.issued();
  }
  CHECK(point.any_source(3).inner()->generation == 1);
  CHECK(point.transfer({1, 3, false}).inner()->generation == 1);
  CHECK(point.finish(&retired));
  CHECK(retired->generation == 0);
}

void ever_new_tags_are_given_up() {
  Point point(std::make_shared<Fake>(0));
  for (int tag = 0; tag < static_cast<int>(Point::kMaxKeys); ++tag) {
    point.transfer({1, tag, true}).issued();
  }
  Counts hold;
  CHECK(point.arm(std::make_shared<Fake>(1), 0, kLong, &hold));
  CHECK(!hold.transfers_stay && hold.transfers.size() == Point::kMaxKeys);
  point.cancel();
  point.transfer({1, static_cast<int>(Point::kMaxKeys), true}).issued();
  CHECK(point.arm(std::make_shared<Fake>(1), 0, kLong, &hold));
  CHECK(hold.transfers_stay && hold.transfers.empty());
}

void an_operation_on_its_way_keeps_its_backend() {
  Point point(std::make_shared<Fake>(0));
  Counts hold;
  CHECK(point.arm(std::make_shared<Fake>(1), 1, kLong, &hold));
  std::shared_ptr<Fake> retired;
  {
    Point::Ticket ticket = point.collective();
    CHECK(point.decide(hold));
    CHECK(!point.finish(&retired));
    // Refused by its backend: the count is not reached after all.
  }
  CHECK(!point.finish(&retired));
  {
    Point::Ticket ticket = point.collective();
    CHECK(ticket.inner()->generation == 0);
    ticket.issued();
  }
  CHECK(point.finish(&retired));
}

void the_end_wakes_who_waits() {
  Point point(std::make_shared<Fake>(0));
  Counts hold;
  CHECK(point.arm(std::make_shared<Fake>(1), 0, kLong, &hold));
  std::atomic<bool> waiting{false};
  std::thread training([&] {
    Point::Ticket ticket = point.collective();
    CHECK(!ticket.inner());
    waiting.store(true);
    ticket.wait();
    CHECK(ticket.inner()->generation == 0);
    ticket.issued();
  });
  while (!waiting.load()) rest();
  point.let_go();
  training.join();
  CHECK(!point.decide(hold));
  CHECK(point.close().size() == 2);
  CHECK(point.closed() && point.close().empty());
  CHECK(!point.arm(std::make_shared<Fake>(2), 0, kLong, &hold));
}

}  // namespace
}  // namespace crux

int main() {
  using namespace crux;
  ranks_never_part_in_any_interleaving();
  more_ranks_never_part_in_random_interleavings();
  threads_hand_over_many_times(3, 500);
  nobody_slips_past_the_look(20000);
  who_waits_too_long_goes_on_as_before();
  ranks_stop_where_the_next_one_is_made(3, 100, false);
  ranks_stop_where_the_next_one_is_made(2, 100, true);
  who_stops_for_too_long_goes_on();
  transfers_stay_where_anybody_may_be_the_source();
  first_receive_from_anybody_after_the_decision_takes_what_was_sent_before();
  ever_new_tags_are_given_up();
  an_operation_on_its_way_keeps_its_backend();
  the_end_wakes_who_waits();
  std::puts("handover: ok");
  return 0;
}
