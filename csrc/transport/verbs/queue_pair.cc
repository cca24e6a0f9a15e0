#include "queue_pair.h"

#include <cstddef>
#include <cstring>
#include <thread>

#include "flow_label.h"
#include "live_work.h"
#include "mlx5.h"

namespace crux::transport::verbs {
namespace {

constexpr int kTrafficClassEcnBits = 2;

// What a later call says of `to`, an earlier one that `mask` bits of it were part of.
void merge(const Transition& call, Transition& to) {
  const int both = call.mask & to.mask;
  if (both & IBV_QP_ACCESS_FLAGS) to.attributes.qp_access_flags = call.attributes.qp_access_flags;
  if (both & IBV_QP_MIN_RNR_TIMER) to.attributes.min_rnr_timer = call.attributes.min_rnr_timer;
  if (both & IBV_QP_AV) to.attributes.ah_attr = call.attributes.ah_attr;
  if (both & IBV_QP_RATE_LIMIT) to.attributes.rate_limit = call.attributes.rate_limit;
  if (both & IBV_QP_TIMEOUT) to.attributes.timeout = call.attributes.timeout;
  if (both & IBV_QP_RETRY_CNT) to.attributes.retry_cnt = call.attributes.retry_cnt;
  if (both & IBV_QP_RNR_RETRY) to.attributes.rnr_retry = call.attributes.rnr_retry;
  if (both & IBV_QP_MAX_QP_RD_ATOMIC) to.attributes.max_rd_atomic = call.attributes.max_rd_atomic;
  if (both & IBV_QP_MAX_DEST_RD_ATOMIC)
    to.attributes.max_dest_rd_atomic = call.attributes.max_dest_rd_atomic;
}

Address address_of(const ibv_gid& gid) { return Address::v6(gid.raw); }

}  // namespace

Transition Transition::copy(const ibv_qp_attr& attributes, int mask) {
  Transition call;
  const size_t size =
      mask & IBV_QP_RATE_LIMIT ? sizeof(ibv_qp_attr) : offsetof(ibv_qp_attr, rate_limit);
  std::memcpy(&call.attributes, &attributes, size);
  call.mask = mask;
  return call;
}

Path Path::of(const ibv_qp_attr& attributes) {
  return {attributes.ah_attr.grh.traffic_class, attributes.ah_attr.grh.flow_label};
}

void Path::write(ibv_qp_attr& attributes) const {
  attributes.ah_attr.grh.traffic_class = traffic_class;
  attributes.ah_attr.grh.flow_label = flow_label;
}

QueuePair::QueuePair(uint64_t id, const crux_verbs_calls& real, ibv_qp* handle)
    : id(id),
      real(real),
      handle(handle),
      context(handle->context),
      number(handle->qp_num),
      device(to_name(handle->context->device->name)),
      state(handle->state) {}

QueuePair::~QueuePair() = default;

void QueuePair::remember(const Transition& call) {
  const ibv_qp_attr& given = call.attributes;
  if (call.mask & (IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE)) has_alternate_path = true;
  Transition* made = nullptr;
  if (call.mask & IBV_QP_STATE) {
    if (given.qp_state == IBV_QPS_INIT && state != IBV_QPS_INIT) made = &to_init;
    if (given.qp_state == IBV_QPS_RTR) made = &to_rtr;
    if (given.qp_state == IBV_QPS_RTS && state == IBV_QPS_RTR) made = &to_rts;
    state = given.qp_state;
  }
  if (made != nullptr) {
    *made = call;
  } else {
    for (Transition* earlier : {&to_init, &to_rtr, &to_rts}) merge(call, *earlier);
  }
  if (!(call.mask & IBV_QP_AV)) return;
  path = Path::of(given);
  if (call.mask & IBV_QP_DEST_QPN) peer_number = given.dest_qp_num;
  if (!given.ah_attr.is_global) return;
  peer = address_of(given.ah_attr.grh.dgid);
  udp_port = path.flow_label == 0 ? 0 : udp_port_of(path.flow_label);
  ibv_gid gid{};
  if (real.query_gid(context, given.ah_attr.port_num, given.ah_attr.grh.sgid_index, &gid) == 0)
    local = address_of(gid);
}

crux_connection QueuePair::describe() const {
  const std::lock_guard lock(mutex);
  crux_connection out{};
  out.id = id;
  out.kind = CRUX_QP;
  out.how = how;
  out.error = error;
  out.fd = -1;
  std::memcpy(out.owner, owner.data(), sizeof out.owner);
  std::memcpy(out.device, device.data(), sizeof out.device);
  if (!local.is_any()) local.write(out.local, sizeof out.local);
  if (!peer.is_any()) peer.write(out.peer, sizeof out.peer);
  out.local_port = udp_port;
  out.peer_port = peer.is_any() ? 0 : 4791;
  out.qpn = number;
  out.peer_qpn = peer_number;
  out.flow_label = path.flow_label;
  out.dscp = to_rtr.mask == 0 ? -1 : path.traffic_class >> kTrafficClassEcnBits;
  out.state = state;
  out.rate_Bps = rate_Bps;
  if (live) {
    out.bytes_sent = live->work.bytes_sent;
    out.bytes_received = live->work.bytes_received;
  }
  return out;
}

Exclusive::Exclusive(QueuePair& pair, For purpose) : pair_(pair) {
  std::unique_lock lock(pair.mutex);
  if (purpose == For::kChange) {
    taken_ = !pair.is_busy && pair.callers_wait == 0;
  } else {
    ++pair.callers_wait;
    while (pair.is_busy) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
    }
    --pair.callers_wait;
    taken_ = true;
  }
  if (taken_) pair.is_busy = true;
}

Exclusive::~Exclusive() {
  if (!taken_) return;
  const std::lock_guard lock(pair_.mutex);
  pair_.is_busy = false;
}

}  // namespace crux::transport::verbs
