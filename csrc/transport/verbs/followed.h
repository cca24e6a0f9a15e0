// Contexts whose work is followed: post_send, post_recv and poll_cq go through this library, so
// that a live queue pair can be emptied, reset and given back what it had.
//
// Only in processes that asked for it before they opened a device; all others keep the device's own
// table of calls, at its full speed.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "queue_pair.h"

namespace crux::transport::verbs {

// A completion queue, with what was taken from the device and not yet by the caller.
class CompletionQueue {
 public:
  CompletionQueue(ibv_cq* handle, const ibv_context_ops& ops, bool has_spare_entry)
      : handle_(handle), poll_(ops.poll_cq), cqe_(handle->cqe), has_spare_(has_spare_entry) {}

  void attach(const std::shared_ptr<QueuePair>& pair);
  void detach(const QueuePair& pair);
  // ibv_poll_cq() for the caller.
  int poll(int count, ibv_wc* out);
  // Takes what the device has, so that a reset of a queue pair can't discard it.
  void collect();
  // Reports a request that the device was never given. May be called with any lock held.
  void report(uint64_t wr_id, ibv_wc_status status, uint32_t number);
  // Some queue pair's gate is closed, or something waits behind it: poll() looks after it.
  void attend() { attend_ = true; }
  // Takes the entry that was reserved for a marker, and puts it back.
  bool take_spare();
  void put_spare() { spare_is_taken_ = false; }
  // No more is taken from the device; and again.
  void close();
  void reopen();

 private:
  int take(int count, ibv_wc* out);
  bool is_callers(const ibv_wc& completion);
  void look_after_gates();

  ibv_cq* const handle_;
  int (*const poll_)(ibv_cq*, int, ibv_wc*);
  const int cqe_;
  const bool has_spare_;
  std::atomic<bool> spare_is_taken_{false};
  std::mutex mutex_;  // taken before that of a queue pair
  bool closed_ = false;
  std::atomic<bool> attend_{false}, has_reports_{false};
  std::deque<ibv_wc> waiting_;
  std::mutex reports_mutex_;  // taken last
  std::deque<ibv_wc> reports_;
  std::unordered_map<uint32_t, std::shared_ptr<QueuePair>> pairs_;  // by number
};

class Followed {
 public:
  // Contexts that are opened from now on; CRUX_LIVE_QP=1 from the start.
  void enable(bool on) { enabled_ = on; }

  void opened(ibv_context* context);
  void closes(ibv_context* context);
  // Creates it with an entry more, where the device has one, for a marker.
  ibv_cq* create_cq(const crux_verbs_calls& real, ibv_context* context, int cqe, void* cq_context,
                    ibv_comp_channel* channel, int comp_vector);
  void cq_closes(const ibv_cq* handle, const std::shared_ptr<CompletionQueue>& cq);
  // Follows it from now on, or says why not.
  void created(const std::shared_ptr<QueuePair>& pair, const ibv_qp_init_attr& attributes);
  void destroyed(const QueuePair& pair);

  std::shared_ptr<QueuePair> pair(const ibv_qp* handle) const;
  std::shared_ptr<CompletionQueue> cq(const ibv_cq* handle) const;
  // The device's own table.
  ibv_context_ops ops(const ibv_context* context) const;
  bool has(const ibv_context* context) const;

 private:
  std::atomic<bool> enabled_{false};
  mutable std::shared_mutex mutex_;
  std::unordered_map<const ibv_context*, ibv_context_ops> contexts_;
  std::unordered_map<const ibv_cq*, std::shared_ptr<CompletionQueue>> cqs_;
  std::unordered_map<const ibv_qp*, std::shared_ptr<QueuePair>> pairs_;
};

Followed& followed();

}  // namespace crux::transport::verbs
