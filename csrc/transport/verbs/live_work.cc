#include "live_work.h"

#include <cerrno>
#include <new>

#include "followed.h"

namespace crux::transport::verbs {
namespace {

template <typename Request>
size_t length_of(const Request* first, const Request* end) {
  size_t count = 0;
  for (; first != end && first != nullptr; first = first->next) ++count;
  return count;
}

uint64_t inline_bytes(const ibv_send_wr& request) {
  if (!(request.send_flags & IBV_SEND_INLINE)) return 0;
  uint64_t bytes = 0;
  for (int i = 0; i < request.num_sge; ++i) bytes += request.sg_list[i].length;
  return bytes;
}

}  // namespace

bool LiveWork::holds_sends() const {
  if (!work.held.empty()) return true;
  // The tail of a row of unsignaled sends would never be reported: wait for a signaled one.
  return gate == Gate::kDraining ? !work.ends_unsignaled() : gate != Gate::kOpen;
}

int LiveWork::post_one(ibv_qp* handle, ibv_send_wr& request) {
  ibv_send_wr* ignored = nullptr;
  ibv_send_wr alone = request;
  alone.next = nullptr;
  work.sends(alone);
  const int result = ops.post_send(handle, &alone, &ignored);
  if (result != 0) work.take_back_sends(1);
  return result;
}

int LiveWork::post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** refused) {
  if (gate == Gate::kOpen && work.held.empty()) {
    size_t count = 0;
    for (ibv_send_wr* one = request; one != nullptr; one = one->next, ++count) work.sends(*one);
    const int result = ops.post_send(handle, request, refused);
    if (result != 0) work.take_back_sends(count - length_of(request, *refused));
    return result;
  }
  for (; request != nullptr; request = request->next) {
    int result = 0;
    if (!holds_sends()) {
      result = post_one(handle, *request);
    } else if (!work.has_room_for_send()) {
      result = ENOMEM;
    } else if (request->num_sge < 0 ||
               static_cast<uint32_t>(request->num_sge) > work.limits().max_send_sge ||
               inline_bytes(*request) > work.limits().max_inline_data) {
      result = EINVAL;
    } else {
      work.held.emplace_back(*request);
    }
    if (result != 0) {
      *refused = request;
      return result;
    }
  }
  return 0;
}

int LiveWork::post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** refused) {
  const bool waits = gate == Gate::kChanging || work.next_receive() != nullptr;
  if (!waits) {
    size_t count = 0;
    for (ibv_recv_wr* one = request; one != nullptr; one = one->next, ++count)
      work.receives(*one, true);
    const int result = ops.post_recv(handle, request, refused);
    if (result != 0) work.take_back_receives(count - length_of(request, *refused));
    return result;
  }
  for (; request != nullptr; request = request->next) {
    const bool fits = request->num_sge >= 0 &&
                      static_cast<uint32_t>(request->num_sge) <= work.limits().max_recv_sge;
    if (!fits || !work.has_room_for_receive()) {
      *refused = request;
      return fits ? ENOMEM : EINVAL;
    }
    work.receives(*request, false);
  }
  return gate == Gate::kChanging ? 0 : (post_receives(handle), 0);
}

bool LiveWork::completed(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS) {
    // What a change flushed out of the queue pair goes back into it.
    if (gate == Gate::kChanging) return false;
    lost = "the connection has failed";
    return !(work.marker_is_out() && completion.wr_id == work.marker_id());
  }
  if (lost != nullptr) return true;
  if (completion.opcode & IBV_WC_RECV) {
    work.bytes_received += completion.byte_len;
    if (!work.received(completion.wr_id)) lost = "receives completed out of their order";
    return true;
  }
  const Work::Of whose = work.sent(completion.wr_id);
  if (whose == Work::Of::kUnknown) lost = "sends completed out of their order";
  if (whose == Work::Of::kMarker) send_cq->put_spare();
  return whose != Work::Of::kMarker;
}

void LiveWork::close_gate(Clock::time_point until) {
  if (gate == Gate::kOpen) gate = Gate::kDraining;
  lease_end = until;
  send_cq->attend();
  recv_cq->attend();
}

void LiveWork::open_gate(ibv_qp* handle) {
  gate = Gate::kOpen;
  by_caller = false;
  attend(handle);
}

bool LiveWork::attend(ibv_qp* handle) {
  if (gate == Gate::kChanging) return true;
  // A connection that has failed reports its sends as flushed only once it has them.
  const bool ends = lost != nullptr || Clock::now() >= lease_end;
  if (gate != Gate::kOpen && ends) {
    gate = Gate::kOpen;
    by_caller = false;
  }
  post_receives(handle);
  if (gate == Gate::kOpen) flush(handle);
  return gate != Gate::kOpen || !work.held.empty() || work.next_receive() != nullptr;
}

void LiveWork::flush(ibv_qp* handle) {
  while (!work.held.empty()) {
    ibv_send_wr& request = work.held.front().request();
    const int result = post_one(handle, request);
    if (result == ENOMEM && work.sends_left() > 0) {
      send_cq->attend();  // again when something has completed
      return;
    }
    // The caller was told that it was posted, so it has to hear of it.
    if (result != 0) send_cq->report(request.wr_id, IBV_WC_GENERAL_ERR, handle->qp_num);
    work.held.pop_front();
  }
}

int LiveWork::post_marker(ibv_qp* handle) {
  if (!work.peer_takes_writes() || !send_cq->take_spare()) return EOPNOTSUPP;
  ibv_send_wr marker{}, *ignored = nullptr;
  marker.wr_id = work.marker_id();
  marker.opcode = IBV_WR_RDMA_WRITE;
  marker.send_flags = IBV_SEND_SIGNALED;
  work.sends_marker();
  const int result = ops.post_send(handle, &marker, &ignored);
  if (result != 0) {
    work.take_back_marker();
    send_cq->put_spare();
  }
  return result;
}

int LiveWork::post_receives(ibv_qp* handle) {
  while (const Receive* receive = work.next_receive()) {
    std::vector<ibv_sge> pieces = receive->pieces;
    ibv_recv_wr request{}, *ignored = nullptr;
    request.wr_id = receive->wr_id;
    request.sg_list = pieces.data();
    request.num_sge = static_cast<int>(pieces.size());
    if (const int result = ops.post_recv(handle, &request, &ignored)) return result;
    work.receive_was_posted();
  }
  return 0;
}

void LiveWork::entered(ibv_qp* handle, ibv_qp_state state) {
  if (state == IBV_QPS_RESET) {
    work.clear();
    lost = nullptr;
    gate = Gate::kOpen;
    by_caller = false;
  } else if (state == IBV_QPS_ERR && gate != Gate::kOpen) {
    open_gate(handle);
  }
}

void LiveWork::give_up(const ibv_qp* handle) {
  lost = "the queue pair could not be set up again";
  gate = Gate::kOpen;
  for (HeldSend& send : work.held)
    send_cq->report(send.request().wr_id, IBV_WC_WR_FLUSH_ERR, handle->qp_num);
  for (const uint64_t wr_id : work.drop_receives())
    recv_cq->report(wr_id, IBV_WC_WR_FLUSH_ERR, handle->qp_num);
  work.clear();
}

}  // namespace crux::transport::verbs
