// What a followed queue pair has been given and not yet reported as done.
//
// Bookkeeping alone: no verbs calls, no locks. A reliable connection reports in the order of
// posting, so a completion names the first signaled send, or the first receive, that is left.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace crux::transport::verbs {

// A work request of its own: nothing in it points at what the caller may reuse.
class HeldSend {
 public:
  explicit HeldSend(const ibv_send_wr& request);
  // Valid as long as this object stays where it is.
  ibv_send_wr& request();

 private:
  ibv_send_wr request_;
  std::vector<ibv_sge> pieces_;
  std::vector<uint8_t> inline_data_;
};

struct Receive {
  uint64_t wr_id;
  std::vector<ibv_sge> pieces;
};

class Work {
 public:
  enum class Of { kCaller, kMarker, kUnknown };

  Work(const ibv_qp_cap& limits, bool all_signaled)
      : limits_(limits), all_signaled_(all_signaled) {}

  const ibv_qp_cap& limits() const { return limits_; }

  // A send that is about to be posted, and the last `count` of them taken back: they were refused.
  void sends(const ibv_send_wr& request);
  void take_back_sends(size_t count);
  void sends_marker();
  void take_back_marker();
  // The success of `wr_id` was reported: whose it was. kUnknown: it is not what was expected.
  Of sent(uint64_t wr_id);

  size_t sends_left() const { return sends_.size(); }
  // Whether the last send will not be reported by itself.
  bool ends_unsignaled() const { return !sends_.empty() && !sends_.back().signaled; }
  bool marker_is_out() const { return marker_is_out_; }
  // An RDMA write has succeeded, so the peer allows them.
  bool peer_takes_writes() const { return peer_takes_writes_; }
  // What a marker carries: no request of the caller's has it.
  uint64_t marker_id() const { return reinterpret_cast<uintptr_t>(this); }

  bool has_room_for_send() const { return sends_.size() + held.size() < limits_.max_send_wr; }
  bool has_room_for_receive() const { return receives_.size() < limits_.max_recv_wr; }

  // `is_posted`: the queue pair has it, not only this list.
  void receives(const ibv_recv_wr& request, bool is_posted);
  void take_back_receives(size_t count);
  bool received(uint64_t wr_id);
  // The queue pair has discarded all of them.
  void discard_receives() { posted_receives_ = 0; }
  // The next one that it has to be given; null where it has them all.
  const Receive* next_receive() const;
  void receive_was_posted() { ++posted_receives_; }
  size_t receives_left() const { return receives_.size(); }
  std::vector<uint64_t> drop_receives();

  // Nothing is left: the queue pair was reset.
  void clear();

  std::deque<HeldSend> held;
  uint64_t bytes_sent = 0, bytes_received = 0;

 private:
  struct Send {
    uint64_t wr_id;
    bool signaled, writes;
  };

  ibv_qp_cap limits_;
  bool all_signaled_;
  bool marker_is_out_ = false, peer_takes_writes_ = false;
  std::deque<Send> sends_;
  std::deque<Receive> receives_;
  size_t posted_receives_ = 0;  // the first of them
};

}  // namespace crux::transport::verbs
