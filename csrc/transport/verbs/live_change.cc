#include "live_change.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "fault.h"
#include "flow_label.h"
#include "followed.h"
#include "live_work.h"
#include "mlx5.h"

namespace crux::transport::verbs {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kFirstPause{20}, kLongestPause{1000};
constexpr milliseconds kRecoveryPause{2};
constexpr int kRecoveryAttempts = 8;
constexpr int kSettleAttempts = 5;

// Lets sends go on when a change that stopped them itself is over.
class Reopen {
 public:
  explicit Reopen(QueuePair& pair) : pair_(pair) {}
  ~Reopen() {
    const std::lock_guard lock(pair_.mutex);
    if (pair_.live->gate == Gate::kOpen || pair_.live->by_caller) return;
    pair_.live->open_gate(pair_.handle);
  }
  Reopen(const Reopen&) = delete;
  Reopen& operator=(const Reopen&) = delete;

 private:
  QueuePair& pair_;
};

const char* obstacle(const QueuePair& pair) {
  if (!pair.live) return pair.not_followed ? pair.not_followed : "its work is not followed";
  if (pair.live->lost != nullptr) return pair.live->lost;
  if (pair.has_alternate_path) return "it has an alternate path";
  if (pair.to_init.mask == 0 || !(pair.to_rtr.mask & IBV_QP_AV) || pair.to_rts.mask == 0)
    return "it was not seen being connected";
  return nullptr;
}

// Waits until nothing that was sent is left. Takes completions itself: the caller may be busy, and
// gets them with its next ibv_poll_cq().
int drain(QueuePair& pair, Clock::time_point deadline) {
  LiveWork& live = *pair.live;
  const Clock::time_point marker_time = Clock::now() + (deadline - Clock::now()) / 4;
  microseconds pause = kFirstPause;
  for (;;) {
    {
      const std::lock_guard lock(pair.mutex);
      if (live.lost != nullptr) return ENOTCONN;
      if (pair.callers_wait > 0 || live.gate == Gate::kOpen) return ECANCELED;
      if (live.is_drained()) {
        live.gate = Gate::kHeld;
        return 0;
      }
      // Nobody sends, and what was sent last says nothing of itself.
      if (Clock::now() >= marker_time && live.work.ends_unsignaled()) live.post_marker(pair.handle);
    }
    if (Clock::now() >= deadline) return ETIMEDOUT;
    live.send_cq->collect();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

int stop_sends(QueuePair& pair, milliseconds timeout, milliseconds lease, bool by_caller) {
  if (faults().strikes(Step::kDrain)) return ETIMEDOUT;
  const Clock::time_point now = Clock::now();
  {
    const std::lock_guard lock(pair.mutex);
    pair.live->close_gate(now + timeout + lease);
    pair.live->by_caller = pair.live->by_caller || by_caller;
  }
  const int result = drain(pair, now + timeout);
  if (result == 0) return 0;
  const std::lock_guard lock(pair.mutex);
  if (pair.live->gate != Gate::kOpen) pair.live->open_gate(pair.handle);
  return result;
}

struct Psns {
  uint32_t send = 0, receive = 0;
};

// The transitions of one change; made by one thread while the gate is at kChanging.
class Transitions {
 public:
  Transitions(QueuePair& pair, const Psns& psns) : pair_(pair), psns_(psns) {
    if (pair.real.query_ece == nullptr || pair.real.query_ece(pair.handle, &enhancements_) != 0)
      enhancements_ = {};
  }

  int query(Psns& psns) const {
    if (faults().strikes(Step::kQuery)) return EIO;
    ibv_qp_attr now{};
    ibv_qp_init_attr ignored{};
    const int result =
        pair_.real.query_qp(pair_.handle, &now, IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &ignored);
    psns = {now.sq_psn, now.rq_psn};
    return result;
  }

  int reset() { return to(Step::kReset, state(IBV_QPS_RESET)); }

  // From RESET to RTS over `path`, with the receives that RESET has discarded.
  int connect(const Path& path) {
    int result = to(Step::kInit, pair_.to_init);
    if (result == 0) result = give_receives();
    if (result == 0 && enhancements_.options != 0 && pair_.real.set_ece != nullptr)
      result = pair_.real.set_ece(pair_.handle, &enhancements_);
    Transition rtr = pair_.to_rtr;
    path.write(rtr.attributes);
    rtr.attributes.rq_psn = psns_.receive;
    if (result == 0) result = to(Step::kRtr, rtr);
    Transition rts = pair_.to_rts;
    rts.attributes.sq_psn = psns_.send;
    if (result == 0) result = to(Step::kRts, rts);
    return result;
  }

  // Out of whatever state a failed change has left, back to RTS over `path`.
  int recover(const Path& path) {
    int result = EIO;
    for (int attempt = 0; attempt < kRecoveryAttempts; ++attempt) {
      if (attempt > 0) std::this_thread::sleep_for(kRecoveryPause * attempt);
      if ((result = reset()) != 0) {
        to(Step::kReset, state(IBV_QPS_ERR));
        result = reset();
      }
      if (result != 0) continue;
      // What the error state has flushed is not the caller's to see.
      pair_.live->send_cq->collect();
      pair_.live->recv_cq->collect();
      {
        const std::lock_guard lock(pair_.mutex);
        pair_.live->work.discard_receives();
      }
      if ((result = connect(path)) == 0) return 0;
    }
    return result;
  }

  ibv_qp_state current_state() const {
    ibv_qp_attr now{};
    ibv_qp_init_attr ignored{};
    const int result = pair_.real.query_qp(pair_.handle, &now, IBV_QP_STATE, &ignored);
    return result == 0 ? now.qp_state : IBV_QPS_UNKNOWN;
  }

 private:
  static Transition state(ibv_qp_state to) {
    Transition transition;
    transition.attributes.qp_state = to;
    transition.mask = IBV_QP_STATE;
    return transition;
  }

  int to(Step step, Transition transition) {
    if (faults().strikes(step)) return EIO;
    return pair_.real.modify_qp(pair_.handle, &transition.attributes, transition.mask);
  }

  int give_receives() {
    const std::lock_guard lock(pair_.mutex);
    if (faults().strikes(Step::kRepost)) return EIO;
    return pair_.live->post_receives(pair_.handle);
  }

  QueuePair& pair_;
  const Psns psns_;
  ibv_ece enhancements_{};  // connection options that both ends agreed on
};

// Both numbers, once the peer has been seen to be quiet: a message that arrives between the look
// and the reset would be lost.
int settle(QueuePair& pair, Psns& psns) {
  const Transitions transitions(pair, {});
  for (int attempt = 0; attempt < kSettleAttempts; ++attempt) {
    Psns first;
    if (const int result = transitions.query(first)) return result;
    pair.live->recv_cq->collect();
    std::this_thread::sleep_for(kFirstPause);
    if (const int result = transitions.query(psns)) return result;
    pair.live->recv_cq->collect();
    if (first.send == psns.send && first.receive == psns.receive) return 0;
  }
  return EBUSY;
}

void end_changing(QueuePair& pair) {
  const std::lock_guard lock(pair.mutex);
  if (pair.live->gate == Gate::kChanging) pair.live->gate = Gate::kHeld;
  pair.live->post_receives(pair.handle);
}

// RESET, INIT, RTR, RTS. The gate is at kHeld before and after.
Outcome reset_to(QueuePair& pair, const Path& path) {
  {
    const std::lock_guard lock(pair.mutex);
    if (pair.live->gate != Gate::kHeld || !pair.live->is_drained())
      return {pair.how, ECANCELED, false, "its sends were let go meanwhile"};
    pair.live->gate = Gate::kChanging;
  }
  const Path old = pair.path;
  Psns psns;
  if (const int error = settle(pair, psns)) {
    end_changing(pair);
    return {pair.how, error, false,
            error == EBUSY ? "its peer was sending" : "its packet numbers could not be read"};
  }
  Transitions transitions(pair, psns);
  int error = transitions.reset();
  if (error != 0 && transitions.current_state() == IBV_QPS_RTS) {
    end_changing(pair);
    return {pair.how, error, false, "the device refused the reset"};
  }
  if (error == 0) {
    {
      const std::lock_guard lock(pair.mutex);
      pair.live->work.discard_receives();
    }
    error = transitions.connect(path);
  }
  Outcome outcome{CRUX_LIVE_RESET, 0, true, ""};
  if (error != 0) {
    const int broken = transitions.recover(old);
    outcome = {pair.how, error, false, "the device refused a transition; the old path is back"};
    if (broken != 0) {
      const std::lock_guard lock(pair.mutex);
      pair.live->give_up(pair.handle);
      pair.state = IBV_QPS_ERR;
      return {CRUX_REFUSED, broken, false, "the device refused every transition: it is broken"};
    }
  }
  if (pair.rate_limit) pair.rate_limit->apply(pair.handle);
  if (outcome.is_applied) {
    const std::lock_guard lock(pair.mutex);
    path.write(pair.to_rtr.attributes);
    pair.path = path;
    pair.udp_port = path.flow_label == 0 ? 0 : udp_port_of(path.flow_label);
  }
  end_changing(pair);
  return outcome;
}

Outcome change_by_reset(QueuePair& pair, const Path& path, milliseconds timeout) {
  bool is_held;
  {
    const std::lock_guard lock(pair.mutex);
    if (!queue_pairs().allows_reset(pair))
      return {CRUX_NEEDS_SWITCH, EPERM, false, "its owner does not allow a reset"};
    if (const char* const reason = obstacle(pair))
      return {CRUX_NEEDS_SWITCH, EOPNOTSUPP, false, reason};
    is_held = pair.live->gate == Gate::kHeld;
  }
  const Reopen reopen(pair);
  if (!is_held) {
    if (const int error = stop_sends(pair, timeout, timeout, false))
      return {pair.how, error, false, "its sends did not come to an end"};
  }
  return reset_to(pair, path);
}

Outcome change_path(QueuePair& pair, const Wanted& wanted, milliseconds timeout) {
  Path path;
  {
    const std::lock_guard lock(pair.mutex);
    if (pair.state != IBV_QPS_RTS) return {pair.how, ENOTCONN, false, "it is not connected"};
    if (!pair.to_rtr.attributes.ah_attr.is_global)
      return {pair.how, EOPNOTSUPP, false, "it has no global address"};
    path = pair.path;
  }
  const Path old = path;
  if (wanted.dscp >= 0)
    path.traffic_class = static_cast<uint8_t>(wanted.dscp << 2 | (path.traffic_class & 3));
  if (wanted.udp_port != 0) path.flow_label = flow_label_of(wanted.udp_port);
  if (path == old) return {pair.how, 0, true, ""};
  if (path.traffic_class == old.traffic_class &&
      mlx5::set_udp_port(pair.handle, wanted.udp_port) == 0) {
    const std::lock_guard lock(pair.mutex);
    path.write(pair.to_rtr.attributes);
    pair.path = path;
    pair.udp_port = wanted.udp_port;
    return {CRUX_LIVE_DEVICE, 0, true, ""};
  }
  return change_by_reset(pair, path, timeout);
}

crux_how how_of(const QueuePair& pair) {
  const std::lock_guard lock(pair.mutex);
  return pair.how;
}

Outcome change_rate(QueuePair& pair, uint64_t rate_Bps) {
  const bool has_limit = pair.rate_limit != nullptr;
  if (!has_limit && rate_Bps == 0) return {pair.how, 0, true, ""};
  const int error = has_limit ? pair.rate_limit->set(rate_Bps)
                              : mlx5::limit_rate(pair.handle, rate_Bps, pair.rate_limit);
  if (error != 0) return {CRUX_REFUSED, error, false, "the device can't limit its rate"};
  const std::lock_guard lock(pair.mutex);
  pair.rate_Bps = rate_Bps;
  return {CRUX_LIVE_DEVICE, 0, true, ""};
}

}  // namespace

int hold(QueuePair& pair, milliseconds timeout, milliseconds lease) {
  const Exclusive exclusive(pair, Exclusive::For::kChange);
  if (!exclusive.taken()) return EBUSY;
  {
    const std::lock_guard lock(pair.mutex);
    if (pair.state != IBV_QPS_RTS) return ENOTCONN;
    if (obstacle(pair) != nullptr) return EOPNOTSUPP;
    if (pair.live->gate == Gate::kHeld) {
      pair.live->close_gate(Clock::now() + lease);
      return 0;
    }
  }
  return stop_sends(pair, timeout, lease, true);
}

int release(QueuePair& pair) {
  const Exclusive exclusive(pair, Exclusive::For::kChange);
  if (!exclusive.taken()) return EBUSY;
  const std::lock_guard lock(pair.mutex);
  if (!pair.live || pair.live->gate == Gate::kOpen) return EINVAL;
  pair.live->open_gate(pair.handle);
  return 0;
}

Outcome change(QueuePair& pair, const Wanted& wanted, milliseconds timeout) {
  if (wanted.dscp > 63 || (wanted.udp_port != 0 && wanted.udp_port < kFirstUdpPort))
    return {how_of(pair), EINVAL, false, "no such class or UDP source port"};
  const Exclusive exclusive(pair, Exclusive::For::kChange);
  if (!exclusive.taken()) return {how_of(pair), EBUSY, false, "another change of it is under way"};
  Outcome outcome{pair.how, 0, true, ""};
  if (wanted.dscp >= 0 || wanted.udp_port != 0) outcome = change_path(pair, wanted, timeout);
  if (outcome.error == 0 && wanted.rate_Bps != UINT64_MAX)
    outcome = change_rate(pair, wanted.rate_Bps);
  const std::lock_guard lock(pair.mutex);
  pair.how = outcome.how;
  pair.error = outcome.error;
  return outcome;
}

}  // namespace crux::transport::verbs
