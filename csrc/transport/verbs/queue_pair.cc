#include "queue_pair.h"

#include <cstddef>
#include <cstring>

#include "flow_label.h"

namespace crux::transport::verbs {
namespace {

constexpr int kTrafficClassEcnBits = 2;

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
  const ibv_ah_attr& given = attributes.ah_attr;
  return {given.grh.traffic_class, given.sl, given.grh.flow_label};
}

void Path::write(ibv_qp_attr& attributes) const {
  attributes.ah_attr.grh.traffic_class = traffic_class;
  attributes.ah_attr.grh.flow_label = flow_label;
  attributes.ah_attr.sl = service_level;
}

QueuePair::QueuePair(uint64_t id, const crux_verbs_calls& real, ibv_qp* handle)
    : id(id),
      real(real),
      handle(handle),
      context(handle->context),
      number(handle->qp_num),
      device(to_name(handle->context->device->name)),
      posted_bytes(begin_counting(handle)),
      state(handle->state) {}

void QueuePair::remember(const Transition& call) {
  const ibv_qp_attr& given = call.attributes;
  if (call.mask & IBV_QP_STATE) state = given.qp_state;
  if (!(call.mask & IBV_QP_AV)) return;
  has_path = true;
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
  out.dscp = has_path ? path.traffic_class >> kTrafficClassEcnBits : -1;
  out.state = state;
  out.rate_Bps = rate_Bps;
  if (posted_bytes != nullptr) out.bytes_sent = posted_bytes->load(std::memory_order_relaxed);
  return out;
}

}  // namespace crux::transport::verbs
