#include "path_probe.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

namespace crux::transport {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Answer = SynProbe::Answer;

constexpr size_t kBurst = 16;              // ports probed at once
constexpr int kAttempts = 3;               // of one port at one TTL
constexpr int kRepeats = 3;                // that a port which passed every hop has to pass
constexpr milliseconds kShortestWait{10};  // for the answers to a burst
constexpr milliseconds kLongestWait{80};
constexpr milliseconds kLongestPause{40};  // between bursts that went unanswered

int until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::max<milliseconds::rep>(0, left.count()));
}

// Hands out each port of a range once, except `never`, so that no socket connects to itself.
class PortSupply {
 public:
  PortSupply(const Routes& routes, uint16_t start, uint16_t never)
      : routes_(routes), never_(never), range_(routes.ports()) {
    left_ = range_.last - range_.first + 1;
    next_ = range_.first + start % left_;
  }

  // 0 when all were handed out.
  uint16_t take() {
    while (left_ > 0) {
      --left_;
      const auto port = static_cast<uint16_t>(next_);
      next_ = next_ == range_.last ? range_.first : next_ + 1;
      if (port != never_ && !routes_.skipped(port)) return port;
    }
    return 0;
  }

 private:
  const Routes& routes_;
  uint16_t never_;
  PortRange range_;
  uint32_t left_, next_;
};

// A port on trial.
struct Candidate {
  uint16_t port = 0;
  size_t hop = 0;    // the hop that is probed now; the earlier hops were right
  int attempts = 0;  // to probe this hop
  int repeats = 0;   // probes of the last hop after the first that passed it
  SynProbe probe;
};

// Ports on trial: no more than a burst, because new ones come in only when the others are done.
class Candidates {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  Candidate& operator[](size_t i) { return items_[i]; }
  Candidate* begin() { return items_.data(); }
  Candidate* end() { return items_.data() + size_; }
  void clear() { size_ = 0; }
  void push(Candidate&& candidate) { items_[size_++] = std::move(candidate); }
  Candidate pop() { return std::move(items_[--size_]); }

 private:
  std::array<Candidate, kBurst> items_;
  size_t size_ = 0;
};

// Uses no heap, because a signal handler may connect.
class Search {
 public:
  Search(const ProbedConnection& connection, const Route& route, const Routes& ports,
         uint16_t start, const ProbeLimits& limits, const std::function<bool(uint16_t)>& claim)
      : connection_(connection),
        hops_(route.hops),
        limits_(limits),
        claim_(claim),
        end_(Clock::now() + limits.time),
        supply_(ports, start, connection.peer.port),
        width_(kBurst) {}

  PathFound run() {
    while (Clock::now() < end_ && found_.probes < limits_.probes) {
      fill_burst();
      if (burst_.empty()) break;
      if (!send()) return found_;
      collect();
      if (judge()) return found_;
      adapt();
    }
    // No time was left to repeat their probes.
    for (Candidate& candidate : passed_) {
      if (take(candidate)) return found_;
    }
    const int silence = found_.probes > 0 ? ETIMEDOUT : EADDRINUSE;
    found_.error = found_.via_ttl != 0 ? EHOSTUNREACH : silence;
    return found_;
  }

 private:
  bool passes(const Candidate& candidate) const {
    return candidate.probe.answer() == Answer::kHop &&
           hops_[candidate.hop].accepts(candidate.probe.from());
  }
  bool is_last(const Candidate& candidate) const { return candidate.hop + 1 == hops_.size(); }

  bool take(const Candidate& candidate) {
    if (!claim_(candidate.port)) return false;
    found_.port = candidate.port;
    found_.via_ttl = hops_[candidate.hop].ttl;
    found_.via = candidate.probe.from();
    return true;
  }

  // A port that passed every hop is probed again, alone. Otherwise, ports that passed earlier hops,
  // or got no answer, come before new ones.
  void fill_burst() {
    burst_.clear();
    if (!passed_.empty()) {
      burst_.push(passed_.pop());
      return;
    }
    while (burst_.size() < width_ && !kept_.empty()) burst_.push(kept_.pop());
    while (burst_.size() < width_) {
      Candidate fresh;
      fresh.port = supply_.take();
      if (fresh.port == 0) return;
      burst_.push(std::move(fresh));
    }
  }

  // False for an error that is not about this port alone.
  bool send() {
    for (Candidate& candidate : burst_) {
      const int ttl = hops_[candidate.hop].ttl;
      const int error = candidate.probe.send(connection_, candidate.port, ttl);
      ++candidate.attempts;
      if (error == 0) {
        ++found_.probes;
      } else if (error != EADDRINUSE && error != EACCES) {
        found_.error = error;
        return false;
      }
    }
    return true;
  }

  // Reads answers until all have arrived, one of them ends the search, or time is up.
  void collect() {
    const Clock::time_point deadline = std::min(end_, Clock::now() + wait_);
    std::array<pollfd, kBurst> waiting;
    bool enough = false;
    do {
      bool any = false;
      for (size_t i = 0; i < burst_.size(); ++i) {
        waiting[i] = {burst_[i].probe.waits_on(), POLLIN | POLLOUT, 0};
        any = any || waiting[i].fd >= 0;
      }
      if (!any) return;
      if (::poll(waiting.data(), burst_.size(), until(deadline)) < 0) {
        if (errno != EINTR) return;
        continue;
      }
      for (size_t i = 0; i < burst_.size(); ++i) {
        if (waiting[i].fd < 0 || waiting[i].revents == 0) continue;
        burst_[i].probe.read_answer();
        enough = enough || (passes(burst_[i]) && is_last(burst_[i]));
      }
    } while (!enough && Clock::now() < deadline);
  }

  // True if the search has ended, with a port or without one.
  bool judge() {
    silent_ = 0;
    for (Candidate& candidate : burst_) {
      candidate.probe.close();
      switch (candidate.probe.answer()) {
        case Answer::kReached:
          found_.error = ERANGE;
          return true;
        case Answer::kHop:
          found_.via_ttl = hops_[candidate.hop].ttl;
          found_.via = candidate.probe.from();
          if (!passes(candidate)) {
            if (candidate.repeats == 0) break;
            found_.error = ENOTUNIQ;
            return true;
          }
          candidate.attempts = 0;
          if (!is_last(candidate)) {
            ++candidate.hop;
            kept_.push(std::move(candidate));
          } else if (candidate.repeats < kRepeats) {
            ++candidate.repeats;
            passed_.push(std::move(candidate));
          } else if (take(candidate)) {
            return true;
          }
          break;
        case Answer::kNone:
          ++silent_;
          if (candidate.attempts < kAttempts) {
            (candidate.repeats > 0 ? passed_ : kept_).push(std::move(candidate));
          } else if (candidate.repeats > 0 && take(candidate)) {
            return true;
          }
          break;
        case Answer::kFailed:
          break;
      }
    }
    return false;
  }

  // Missing answers mean that a router limits its ICMP errors, or that the way is long.
  void adapt() {
    if (2 * silent_ <= burst_.size()) {
      width_ = std::min<size_t>(kBurst, 2 * width_);
      pause_ = milliseconds{1};
      return;
    }
    width_ = std::max<size_t>(1, width_ / 2);
    wait_ = std::min(2 * wait_, kLongestWait);
    ::poll(nullptr, 0, std::min(until(end_), static_cast<int>(pause_.count())));
    pause_ = std::min(2 * pause_, kLongestPause);
  }

  const ProbedConnection& connection_;
  const std::vector<Hop>& hops_;
  const ProbeLimits& limits_;
  const std::function<bool(uint16_t)>& claim_;
  Clock::time_point end_;
  PortSupply supply_;
  Candidates burst_, kept_, passed_;
  size_t width_, silent_ = 0;
  milliseconds wait_ = kShortestWait, pause_{1};
  PathFound found_;
};

}  // namespace

PathFound find_port(const ProbedConnection& connection, const Route& route, const Routes& ports,
                    uint16_t start, const ProbeLimits& limits,
                    const std::function<bool(uint16_t)>& claim) {
  return Search(connection, route, ports, start, limits, claim).run();
}

}  // namespace crux::transport
