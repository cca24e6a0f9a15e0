// The work of one followed queue pair, and the gate in front of it.
#pragma once

#include <infiniband/verbs.h>

#include <chrono>
#include <memory>
#include <vector>

#include "work.h"

namespace crux::transport::verbs {

class CompletionQueue;
using Clock = std::chrono::steady_clock;

enum class Gate {
  kOpen,
  kDraining,  // sends wait, except behind one that would not be reported
  kHeld,      // nothing is left: sends wait
  kChanging   // the queue pair is not to be touched: receives wait too
};

// All guarded by the queue pair's mutex.
struct LiveWork {
  LiveWork(const ibv_qp_init_attr& attributes, ibv_context_ops ops,
           std::shared_ptr<CompletionQueue> send_cq, std::shared_ptr<CompletionQueue> recv_cq)
      : work(attributes.cap, attributes.sq_sig_all != 0),
        ops(ops),
        send_cq(std::move(send_cq)),
        recv_cq(std::move(recv_cq)) {}

  Work work;
  const ibv_context_ops ops;  // the device's own
  const std::shared_ptr<CompletionQueue> send_cq, recv_cq;
  Gate gate = Gate::kOpen;
  bool by_caller = false;  // held through crux_transport_hold()
  Clock::time_point lease_end{};
  const char* lost = nullptr;  // why it can't be told any more what is left

  int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** refused);
  int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** refused);
  // Accounts for a completion; false: it is this library's own.
  bool completed(const ibv_wc& completion);

  // Sends wait from now on, at most until `lease_end`.
  void close_gate(Clock::time_point lease_end);
  // Sends go through again, those that waited first.
  void open_gate(ibv_qp* handle);
  // Opens a gate whose lease is over, and gives the device what it did not take before. False:
  // nothing is left to look after.
  bool attend(ibv_qp* handle);
  bool is_drained() const { return work.sends_left() == 0; }

  // A signaled send of no length, whose completion stands for those before it. 0 or an errno.
  int post_marker(ibv_qp* handle);
  // Gives the device the receives that it discarded or did not take. 0 or an errno.
  int post_receives(ibv_qp* handle);
  // The program itself has modified the queue pair.
  void entered(ibv_qp* handle, ibv_qp_state state);
  // Reports everything that waits as flushed, as a broken queue pair does.
  void give_up(const ibv_qp* handle);

 private:
  bool holds_sends() const;
  int post_one(ibv_qp* handle, ibv_send_wr& request);
  void flush(ibv_qp* handle);
};

}  // namespace crux::transport::verbs
