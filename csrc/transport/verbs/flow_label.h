// The UDP source port of RoCEv2, which follows from the flow label in the address vector.
#pragma once

#include <cstdint>

namespace crux::transport::verbs {

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

}  // namespace crux::transport::verbs
