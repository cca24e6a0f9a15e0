// One queue pair of this process: its owner, its connection, and what was set on it.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "../address.h"
#include "../crux_transport.h"
#include "../registry.h"
#include "../standin/standin_abi.h"
#include "posts.h"

namespace crux::transport::verbs {

// The arguments of one ibv_modify_qp() call.
struct Transition {
  ibv_qp_attr attributes{};
  int mask = 0;

  // Copies only the fields that the mask allows: callers that were built against older headers
  // pass a shorter structure.
  static Transition copy(const ibv_qp_attr& attributes, int mask);
};

// The part of an address vector that a plan decides.
struct Path {
  uint8_t traffic_class = 0;
  uint8_t service_level = 0;
  uint32_t flow_label = 0;

  // NCCL takes the service level from the class, unless NCCL_IB_SL says another.
  void give_class(uint8_t wanted) {
    if (traffic_class != 0 && service_level == traffic_class) service_level = wanted;
    traffic_class = wanted;
  }
  static Path of(const ibv_qp_attr& attributes);
  void write(ibv_qp_attr& attributes) const;
  friend bool operator==(const Path& a, const Path& b) {
    return a.traffic_class == b.traffic_class && a.service_level == b.service_level &&
           a.flow_label == b.flow_label;
  }
};

class RateLimit;

struct QueuePair {
  QueuePair(uint64_t id, const crux_verbs_calls& real, ibv_qp* handle);

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
  void remember(const Transition& call);
  crux_connection describe() const;
};

}  // namespace crux::transport::verbs
