#include "fake_ibverbs.h"

#include <arpa/inet.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace fake_verbs {
namespace {

constexpr uint32_t kPsnMask = 0xffffff;

struct Send {
  ibv_send_wr request;
  std::vector<ibv_sge> pieces;
  std::vector<uint8_t> inline_data;
  bool is_signaled;
};

struct Receive {
  uint64_t wr_id;
  std::vector<ibv_sge> pieces;
};

struct Cq : ibv_cq {
  std::deque<ibv_wc> completions;
};

struct Qp : ibv_qp {
  ibv_qp_cap limits;
  bool all_signaled;
  ibv_qp_attr attributes;
  uint32_t send_psn, receive_psn;
  std::deque<Send> sends, unacknowledged;
  std::deque<Receive> receives;
  uint16_t live_udp_port;
  Wire wire;

  Cq& sends_to() { return *static_cast<Cq*>(send_cq); }
  Cq& receives_to() { return *static_cast<Cq*>(recv_cq); }
};

std::mutex mutex;  // guards all of it
std::map<uint32_t, Qp*> queue_pairs;
uint32_t last_number = 0x100;
int lost_completions = 0;
std::map<int, std::pair<int, int>> failures;  // state: every, count
bool refuses_labels = false;
std::function<void()> query_call;
std::thread pumping;
std::atomic<bool> stopping{false};

void complete(Cq& cq, const Qp& qp, uint64_t wr_id, ibv_wc_status status, ibv_wc_opcode opcode,
              uint32_t bytes, const ibv_send_wr* with = nullptr) {
  if (cq.completions.size() >= static_cast<size_t>(cq.cqe)) ++lost_completions;
  ibv_wc completion{};
  completion.wr_id = wr_id;
  completion.status = status;
  completion.opcode = status == IBV_WC_SUCCESS ? opcode : static_cast<ibv_wc_opcode>(0x55);
  completion.byte_len = bytes;
  completion.qp_num = qp.qp_num;
  if (with != nullptr) {
    completion.imm_data = with->imm_data;
    completion.wc_flags = IBV_WC_WITH_IMM;
  }
  cq.completions.push_back(completion);
}

std::vector<uint8_t> gather(const Send& send) {
  if (send.request.send_flags & IBV_SEND_INLINE) return send.inline_data;
  std::vector<uint8_t> data;
  for (const ibv_sge& piece : send.pieces) {
    const auto* const from = reinterpret_cast<const uint8_t*>(piece.addr);
    data.insert(data.end(), from, from + piece.length);
  }
  return data;
}

void scatter(const std::vector<uint8_t>& data, const std::vector<ibv_sge>& pieces) {
  size_t done = 0;
  for (const ibv_sge& piece : pieces) {
    const size_t size = std::min<size_t>(piece.length, data.size() - done);
    if (size > 0) std::memcpy(reinterpret_cast<void*>(piece.addr), data.data() + done, size);
    done += size;
  }
}

void flush(Qp& qp) {
  for (auto* sends : {&qp.unacknowledged, &qp.sends}) {
    for (const Send& send : *sends)
      complete(qp.sends_to(), qp, send.request.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_SEND, 0);
    sends->clear();
  }
  for (const Receive& receive : qp.receives)
    complete(qp.receives_to(), qp, receive.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0);
  qp.receives.clear();
}

void break_down(Qp& qp, ibv_wc_status status) {
  if (!qp.sends.empty()) {
    complete(qp.sends_to(), qp, qp.sends.front().request.wr_id, status, IBV_WC_SEND, 0);
    qp.sends.pop_front();
  }
  qp.state = IBV_QPS_ERR;
  flush(qp);
}

void discard(Cq& cq, uint32_t number) {
  std::deque<ibv_wc> kept;
  for (const ibv_wc& completion : cq.completions) {
    if (completion.qp_num != number) kept.push_back(completion);
  }
  cq.completions.swap(kept);
}

void reset(Qp& qp) {
  qp.sends.clear();
  qp.unacknowledged.clear();
  qp.receives.clear();
  discard(qp.sends_to(), qp.qp_num);
  discard(qp.receives_to(), qp.qp_num);
  qp.live_udp_port = 0;
}

uint16_t udp_port(const Qp& qp) {
  if (qp.live_udp_port != 0) return qp.live_udp_port;
  const uint32_t label = qp.attributes.ah_attr.grh.flow_label;
  return label == 0 ? 0 : ibv_flow_label_to_udp_sport(label);
}

// One message, or one acknowledgement of all that arrived.
bool step(Qp& qp) {
  if (qp.state != IBV_QPS_RTS) return false;
  const auto found = queue_pairs.find(qp.attributes.dest_qp_num);
  if (found == queue_pairs.end()) return false;
  Qp& peer = *found->second;
  const bool listens = peer.state == IBV_QPS_RTR || peer.state == IBV_QPS_RTS;
  if (!qp.unacknowledged.empty()) {
    const Send send = std::move(qp.unacknowledged.front());
    qp.unacknowledged.pop_front();
    const bool writes = send.request.opcode == IBV_WR_RDMA_WRITE ||
                        send.request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    if (send.is_signaled)
      complete(qp.sends_to(), qp, send.request.wr_id, IBV_WC_SUCCESS,
               writes ? IBV_WC_RDMA_WRITE : IBV_WC_SEND, 0);
    return true;
  }
  if (qp.sends.empty() || !listens) return false;
  Send& send = qp.sends.front();
  const ibv_send_wr& request = send.request;
  if (qp.send_psn != peer.receive_psn) {
    break_down(qp, IBV_WC_RETRY_EXC_ERR);
    return true;
  }
  const bool with_data =
      request.opcode == IBV_WR_RDMA_WRITE || request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  const bool takes_receive = request.opcode != IBV_WR_RDMA_WRITE;
  if (takes_receive && peer.receives.empty()) return false;
  const std::vector<uint8_t> data = gather(send);
  if (with_data && !data.empty())
    std::memcpy(reinterpret_cast<void*>(request.wr.rdma.remote_addr), data.data(), data.size());
  if (takes_receive) {
    const Receive receive = std::move(peer.receives.front());
    peer.receives.pop_front();
    if (!with_data) scatter(data, receive.pieces);
    complete(peer.receives_to(), peer, receive.wr_id, IBV_WC_SUCCESS,
             with_data ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
             static_cast<uint32_t>(data.size()), &request);
  }
  qp.send_psn = (qp.send_psn + 1) & kPsnMask;
  peer.receive_psn = (peer.receive_psn + 1) & kPsnMask;
  qp.wire.traffic_class = qp.attributes.ah_attr.grh.traffic_class;
  qp.wire.udp_port = udp_port(qp);
  ++qp.wire.messages;
  qp.unacknowledged.push_back(std::move(send));
  qp.sends.pop_front();
  return true;
}

int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** refused) {
  const std::lock_guard lock(mutex);
  Qp& qp = *static_cast<Qp*>(handle);
  for (; request != nullptr; request = request->next) {
    int error = 0;
    if (qp.state == IBV_QPS_RESET || qp.state == IBV_QPS_INIT || qp.state == IBV_QPS_RTR ||
        static_cast<uint32_t>(request->num_sge) > qp.limits.max_send_sge) {
      error = EINVAL;
    } else if (qp.sends.size() + qp.unacknowledged.size() >= qp.limits.max_send_wr) {
      error = ENOMEM;
    }
    if (error != 0) {
      *refused = request;
      return error;
    }
    Send send{*request, {request->sg_list, request->sg_list + request->num_sge}, {}, false};
    send.is_signaled = qp.all_signaled || (request->send_flags & IBV_SEND_SIGNALED);
    if (request->send_flags & IBV_SEND_INLINE) {
      for (const ibv_sge& piece : send.pieces) {
        const auto* const from = reinterpret_cast<const uint8_t*>(piece.addr);
        send.inline_data.insert(send.inline_data.end(), from, from + piece.length);
      }
    }
    if (qp.state == IBV_QPS_ERR) {
      complete(qp.sends_to(), qp, request->wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_SEND, 0);
    } else {
      qp.sends.push_back(std::move(send));
    }
  }
  return 0;
}

int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** refused) {
  const std::lock_guard lock(mutex);
  Qp& qp = *static_cast<Qp*>(handle);
  for (; request != nullptr; request = request->next) {
    const int error = qp.state == IBV_QPS_RESET                     ? EINVAL
                      : qp.receives.size() >= qp.limits.max_recv_wr ? ENOMEM
                                                                    : 0;
    if (error != 0) {
      *refused = request;
      return error;
    }
    if (qp.state == IBV_QPS_ERR) {
      complete(qp.receives_to(), qp, request->wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0);
    } else {
      qp.receives.push_back(
          {request->wr_id, {request->sg_list, request->sg_list + request->num_sge}});
    }
  }
  return 0;
}

int poll_cq(ibv_cq* handle, int count, ibv_wc* out) {
  const std::lock_guard lock(mutex);
  Cq& cq = *static_cast<Cq*>(handle);
  int filled = 0;
  for (; filled < count && !cq.completions.empty(); ++filled) {
    out[filled] = cq.completions.front();
    cq.completions.pop_front();
  }
  return filled;
}

ibv_context* open_device(ibv_device* device) {
  auto* const context = new ibv_context{};
  context->device = device;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.poll_cq = poll_cq;
  return context;
}

int close_device(ibv_context* context) {
  delete context;
  return 0;
}

ibv_cq* create_cq(ibv_context* context, int cqe, void* cq_context, ibv_comp_channel* channel, int) {
  auto* const cq = new Cq{};
  cq->context = context;
  cq->cqe = cqe;
  cq->cq_context = cq_context;
  cq->channel = channel;
  return cq;
}

int destroy_cq(ibv_cq* handle) {
  const std::lock_guard lock(mutex);
  for (const auto& [number, qp] : queue_pairs) {
    if (qp->send_cq == handle || qp->recv_cq == handle) return EBUSY;
  }
  delete static_cast<Cq*>(handle);
  return 0;
}

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* given) {
  const std::lock_guard lock(mutex);
  auto* const qp = new Qp{};
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = given->send_cq;
  qp->recv_cq = given->recv_cq;
  qp->srq = given->srq;
  qp->qp_type = given->qp_type;
  qp->qp_num = ++last_number;
  qp->state = IBV_QPS_RESET;
  qp->limits = given->cap;
  qp->all_signaled = given->sq_sig_all != 0;
  queue_pairs[qp->qp_num] = qp;
  return qp;
}

int destroy_qp(ibv_qp* handle) {
  const std::lock_guard lock(mutex);
  auto* const qp = static_cast<Qp*>(handle);
  reset(*qp);
  queue_pairs.erase(qp->qp_num);
  delete qp;
  return 0;
}

bool is_next(ibv_qp_state from, ibv_qp_state to) {
  switch (to) {
    case IBV_QPS_RESET:
    case IBV_QPS_ERR:
      return true;
    case IBV_QPS_INIT:
      return from == IBV_QPS_RESET || from == IBV_QPS_INIT;
    case IBV_QPS_RTR:
      return from == IBV_QPS_INIT;
    case IBV_QPS_RTS:
      return from == IBV_QPS_RTR || from == IBV_QPS_RTS;
    default:
      return false;
  }
}

int modify_qp(ibv_qp* handle, ibv_qp_attr* given, int mask) {
  const std::lock_guard lock(mutex);
  Qp& qp = *static_cast<Qp*>(handle);
  const ibv_qp_state to = mask & IBV_QP_STATE ? given->qp_state : qp.state;
  const auto failure = failures.find(to);
  if (failure != failures.end() && failure->second.first != 0 &&
      ++failure->second.second % failure->second.first == 0)
    return EIO;
  if (!is_next(qp.state, to)) return EINVAL;
  if (mask & IBV_QP_AV) {
    if (refuses_labels && given->ah_attr.grh.flow_label != 0) return EINVAL;
    if (qp.state == IBV_QPS_RTS) return EINVAL;
    qp.attributes.ah_attr = given->ah_attr;
  }
  if (mask & IBV_QP_DEST_QPN) qp.attributes.dest_qp_num = given->dest_qp_num;
  if (mask & IBV_QP_RQ_PSN) qp.receive_psn = given->rq_psn;
  if (mask & IBV_QP_SQ_PSN) qp.send_psn = given->sq_psn;
  if (to == IBV_QPS_ERR) flush(qp);
  if (to == IBV_QPS_RESET) reset(qp);
  qp.state = to;
  return 0;
}

int query_qp(ibv_qp* handle, ibv_qp_attr* out, int, ibv_qp_init_attr*) {
  std::function<void()> call;
  {
    const std::lock_guard lock(mutex);
    call = query_call;
  }
  if (call) call();
  const std::lock_guard lock(mutex);
  const Qp& qp = *static_cast<Qp*>(handle);
  *out = qp.attributes;
  out->qp_state = qp.state;
  out->sq_psn = qp.send_psn;
  out->rq_psn = qp.receive_psn;
  return 0;
}

int query_gid(ibv_context* context, uint8_t, int, ibv_gid* gid) {
  *gid = {};
  gid->raw[10] = gid->raw[11] = 0xff;
  gid->raw[12] = 10;
  gid->raw[13] = 9;
  gid->raw[15] = context->device == device(0) ? 1 : 2;
  return 0;
}

int query_ece(ibv_qp*, ibv_ece*) { return EOPNOTSUPP; }

}  // namespace

const crux_verbs_calls& calls() {
  static const crux_verbs_calls table = {open_device, close_device, create_cq, destroy_cq,
                                         create_qp,   modify_qp,    query_qp,  destroy_qp,
                                         query_gid,   query_ece,    nullptr};
  return table;
}

ibv_device* device(int index) {
  static ibv_device devices[2] = {};
  std::strcpy(devices[index].name, index == 0 ? "fake0" : "fake1");
  return &devices[index];
}

int pump() {
  const std::lock_guard lock(mutex);
  int moved = 0;
  for (const auto& [number, qp] : queue_pairs) moved += step(*qp);
  return moved;
}

void start() {
  stopping = false;
  pumping = std::thread([] {
    while (!stopping) {
      if (pump() == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
}

void stop() {
  stopping = true;
  if (pumping.joinable()) pumping.join();
}

void fail_modify(ibv_qp_state state, int every) {
  const std::lock_guard lock(mutex);
  failures[state] = {every, 0};
}

void refuse_flow_labels(bool on) {
  const std::lock_guard lock(mutex);
  refuses_labels = on;
}

void on_query(std::function<void()> call) {
  const std::lock_guard lock(mutex);
  query_call = std::move(call);
}

void set_live_port(ibv_qp* handle, uint16_t udp_port) {
  const std::lock_guard lock(mutex);
  static_cast<Qp*>(handle)->live_udp_port = udp_port;
}

Wire wire(uint32_t qp_num) {
  const std::lock_guard lock(mutex);
  const auto found = queue_pairs.find(qp_num);
  return found == queue_pairs.end() ? Wire{} : found->second->wire;
}

int open_queue_pairs() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(queue_pairs.size());
}

int overruns() {
  const std::lock_guard lock(mutex);
  return lost_completions;
}

}  // namespace fake_verbs
