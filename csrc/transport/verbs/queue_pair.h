// One queue pair of this process: its owner, its connection, and what was set on it.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>

#include "../address.h"
#include "../crux_transport.h"
#include "../registry.h"
#include "../standin/standin_abi.h"
#include "mlx5.h"

namespace crux::transport::verbs {

// Counts what this process posts to its queue pairs with ibv_post_send(), which is an inline call
// through its context. Not seen: ibv_wr_*() of extended queue pairs, and programs that write a
// device's queues themselves (mlx5dv).
//
// Bytes of all requests to send or write that were posted to one queue pair.
using PostedBytes = std::atomic<uint64_t>;

// Begins to count. More than once is harmless.
void count_posts(ibv_context* context);
// Before the context is closed.
void forget_posts(ibv_context* context);
// The counter of a queue pair, at 0; null if there is no place for one.
PostedBytes* begin_counting(const ibv_qp* handle);
// Before the queue pair is destroyed: afterwards another one may have the same address.
void end_counting(const ibv_qp* handle);

// The UDP source port of RoCEv2 follows from the flow label in the address vector.
inline constexpr uint16_t kFirstUdpPort = 0xC000;

// As ibv_flow_label_to_udp_sport() of <infiniband/verbs.h>. With label 0 the driver derives a port
// from the numbers of both queue pairs instead.
constexpr uint16_t udp_port_of(uint32_t flow_label) {
  return static_cast<uint16_t>(((flow_label & 0x3fff) ^ ((flow_label >> 14) & 0x3f)) |
                               kFirstUdpPort);
}

// A label that gives `udp_port`; 0 if none does (ports below 49152).
constexpr uint32_t flow_label_of(uint16_t udp_port) {
  if (udp_port < kFirstUdpPort) return 0;
  const uint32_t low = udp_port & 0x3fff;
  return low != 0 ? low : (1u << 14) | 1;  // the high bits cancel the low ones, and it is not 0
}

static_assert(udp_port_of(flow_label_of(0xC000)) == 0xC000);
static_assert(udp_port_of(flow_label_of(0xFFFF)) == 0xFFFF);
static_assert(flow_label_of(0xBFFF) == 0);

// The arguments of one ibv_modify_qp() call.
struct Transition {
  ibv_qp_attr attributes{};
  int mask = 0;

  // Copies only the fields that the mask allows: callers that were built against older headers
  // pass a shorter structure.
  static Transition copy(const ibv_qp_attr& attributes, int mask) {
    Transition call;
    const size_t size =
        mask & IBV_QP_RATE_LIMIT ? sizeof(ibv_qp_attr) : offsetof(ibv_qp_attr, rate_limit);
    std::memcpy(&call.attributes, &attributes, size);
    call.mask = mask;
    return call;
  }
};

// The part of an address vector that a plan decides.
struct Path {
  uint8_t traffic_class = 0;
  uint8_t service_level = 0;
  uint32_t flow_label = 0;

  // NCCL takes the service level from the class, unless NCCL_IB_SL says another.
  void give_dscp(int dscp) {
    const auto wanted = static_cast<uint8_t>(with_dscp(traffic_class, dscp));
    if (traffic_class != 0 && service_level == traffic_class) service_level = wanted;
    traffic_class = wanted;
  }
  static Path of(const ibv_qp_attr& attributes) {
    const ibv_ah_attr& given = attributes.ah_attr;
    return {given.grh.traffic_class, given.sl, given.grh.flow_label};
  }
  void write(ibv_qp_attr& attributes) const {
    attributes.ah_attr.grh.traffic_class = traffic_class;
    attributes.ah_attr.grh.flow_label = flow_label;
    attributes.ah_attr.sl = service_level;
  }
  friend bool operator==(const Path& a, const Path& b) {
    return a.traffic_class == b.traffic_class && a.service_level == b.service_level &&
           a.flow_label == b.flow_label;
  }
};

struct QueuePair {
  QueuePair(uint64_t id, const crux_verbs_calls& real, ibv_qp* handle)
      : id(id),
        real(real),
        handle(handle),
        context(handle->context),
        number(handle->qp_num),
        device(to_name(handle->context->device->name)),
        posted_bytes(begin_counting(handle)),
        state(handle->state) {}

  const uint64_t id;
  const crux_verbs_calls& real;
  ibv_qp* const handle;
  ibv_context* const context;
  const uint32_t number;
  const Name device;  // a copy: the device may be closed while this is read

  PostedBytes* const posted_bytes;  // null: not counted

  // Held around each call that modifies, changes or destroys the queue pair: while the device
  // changes it, its program must not destroy it.
  std::mutex calls;
  // Taken after `calls`. Guards everything below, which is written only with both held.
  mutable std::mutex mutex;
  Name owner{};
  crux_how how = CRUX_UNTOUCHED;
  int error = 0;
  ibv_qp_state state;
  bool is_destroyed = false;
  bool has_path = false;  // it was given an address vector
  Address local, peer;
  uint32_t peer_number = 0;
  Path path;
  uint16_t udp_port = 0;                  // 0: not known
  uint64_t rate_Bps = 0;                  // 0: no limit
  uint64_t route_rate_Bps = 0;            // to be set when the queue pair reaches RTS
  std::shared_ptr<RateLimit> rate_limit;  // the device's scheduling element, if it has one

  // Records a call that has succeeded.
  void remember(const Transition& call) {
    const ibv_qp_attr& given = call.attributes;
    if (call.mask & IBV_QP_STATE) state = given.qp_state;
    if (!(call.mask & IBV_QP_AV)) return;
    has_path = true;
    path = Path::of(given);
    if (call.mask & IBV_QP_DEST_QPN) peer_number = given.dest_qp_num;
    if (!given.ah_attr.is_global) return;
    peer = Address::v6(given.ah_attr.grh.dgid.raw);
    udp_port = path.flow_label == 0 ? 0 : udp_port_of(path.flow_label);
    ibv_gid gid{};
    if (real.query_gid(context, given.ah_attr.port_num, given.ah_attr.grh.sgid_index, &gid) == 0)
      local = Address::v6(gid.raw);
  }
  crux_connection describe() const {
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
    out.dscp = has_path ? path.traffic_class >> kEcnBits : -1;
    out.state = state;
    out.rate_Bps = rate_Bps;
    if (posted_bytes != nullptr) out.bytes_sent = posted_bytes->load(std::memory_order_relaxed);
    return out;
  }
};

struct Outcome {
  crux_how how = CRUX_UNTOUCHED;
  int error = 0;
  const char* reason = "";  // why the change was not made
};

namespace internal {

inline Outcome change_port(QueuePair& pair, uint16_t udp_port) {
  if (pair.peer.is_any()) return {pair.how, EOPNOTSUPP, "it has no global address"};
  if (pair.udp_port == udp_port) return {pair.how, 0, ""};
  if (const int error = mlx5::set_udp_port(pair.handle, udp_port))
    return {CRUX_NEEDS_HANDOVER, error, "its device can't change the UDP source port"};
  const std::lock_guard lock(pair.mutex);
  pair.path.flow_label = flow_label_of(udp_port);
  pair.udp_port = udp_port;
  return {CRUX_LIVE_DEVICE, 0, ""};
}

inline Outcome change_rate(QueuePair& pair, uint64_t rate_Bps) {
  const bool has_limit = pair.rate_limit != nullptr;
  if (!has_limit && rate_Bps == 0) return {pair.how, 0, ""};
  const int error = has_limit ? pair.rate_limit->set(rate_Bps)
                              : mlx5::limit_rate(pair.handle, rate_Bps, pair.rate_limit);
  if (error != 0) return {CRUX_REFUSED, error, "its device can't limit the rate"};
  const std::lock_guard lock(pair.mutex);
  pair.rate_Bps = rate_Bps;
  return {CRUX_LIVE_DEVICE, 0, ""};
}

}  // namespace internal

// Changes a queue pair that is in use, by the device's own call. Only mlx5 has such calls.
// `udp_port` 0 and `rate_Bps` UINT64_MAX leave that setting; `rate_Bps` 0 removes the limit.
inline Outcome change(QueuePair& pair, uint16_t udp_port, uint64_t rate_Bps) {
  const std::lock_guard calls(pair.calls);
  if (pair.is_destroyed) return {CRUX_UNTOUCHED, ENOENT, "there is no such queue pair"};
  Outcome outcome{pair.how, 0, ""};
  if (udp_port != 0 && udp_port < kFirstUdpPort) {
    outcome = {pair.how, EINVAL, "RoCEv2 sends from UDP ports 49152 to 65535"};
  } else if (pair.state != IBV_QPS_RTS) {
    outcome = {pair.how, ENOTCONN, "it is not connected"};
  } else {
    if (udp_port != 0) outcome = internal::change_port(pair, udp_port);
    if (outcome.error == 0 && rate_Bps != UINT64_MAX)
      outcome = internal::change_rate(pair, rate_Bps);
  }
  const std::lock_guard lock(pair.mutex);
  pair.how = outcome.how;
  pair.error = outcome.error;
  return outcome;
}

}  // namespace crux::transport::verbs
