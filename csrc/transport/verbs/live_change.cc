#include "live_change.h"

#include <cerrno>

#include "flow_label.h"
#include "mlx5.h"

namespace crux::transport::verbs {
namespace {

Outcome change_port(QueuePair& pair, uint16_t udp_port) {
  if (pair.peer.is_any()) return {pair.how, EOPNOTSUPP, "it has no global address"};
  if (pair.udp_port == udp_port) return {pair.how, 0, ""};
  if (const int error = mlx5::set_udp_port(pair.handle, udp_port))
    return {CRUX_NEEDS_SWITCH, error, "its device can't change the UDP source port"};
  const std::lock_guard lock(pair.mutex);
  pair.path.flow_label = flow_label_of(udp_port);
  pair.udp_port = udp_port;
  return {CRUX_LIVE_DEVICE, 0, ""};
}

Outcome change_rate(QueuePair& pair, uint64_t rate_Bps) {
  const bool has_limit = pair.rate_limit != nullptr;
  if (!has_limit && rate_Bps == 0) return {pair.how, 0, ""};
  const int error = has_limit ? pair.rate_limit->set(rate_Bps)
                              : mlx5::limit_rate(pair.handle, rate_Bps, pair.rate_limit);
  if (error != 0) return {CRUX_REFUSED, error, "its device can't limit the rate"};
  const std::lock_guard lock(pair.mutex);
  pair.rate_Bps = rate_Bps;
  return {CRUX_LIVE_DEVICE, 0, ""};
}

}  // namespace

Outcome change(QueuePair& pair, uint16_t udp_port, uint64_t rate_Bps) {
  const std::lock_guard calls(pair.calls);
  if (pair.is_destroyed) return {CRUX_UNTOUCHED, ENOENT, "there is no such queue pair"};
  Outcome outcome{pair.how, 0, ""};
  if (udp_port != 0 && udp_port < kFirstUdpPort) {
    outcome = {pair.how, EINVAL, "RoCEv2 sends from UDP ports 49152 to 65535"};
  } else if (pair.state != IBV_QPS_RTS) {
    outcome = {pair.how, ENOTCONN, "it is not connected"};
  } else {
    if (udp_port != 0) outcome = change_port(pair, udp_port);
    if (outcome.error == 0 && rate_Bps != UINT64_MAX) outcome = change_rate(pair, rate_Bps);
  }
  const std::lock_guard lock(pair.mutex);
  pair.how = outcome.how;
  pair.error = outcome.error;
  return outcome;
}

}  // namespace crux::transport::verbs
