// The C interface: checks the arguments, and lets no exception out.
#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

#include "crux_transport.h"
#include "inside.h"
#include "tcp_socket.h"
#include "transport.h"

namespace crux::transport {
namespace {

template <size_t N>
std::optional<Address> parse(const char (&text)[N]) {
  if (std::memchr(text, '\0', N) == nullptr) return std::nullopt;
  const auto address = Address::parse(text);
  return address && !address->is_any() ? address : std::nullopt;
}

std::optional<Route> to_route(const crux_route& in) {
  const auto destination = parse(in.destination);
  if (!destination || in.dscp < -1 || in.dscp > 63 || in.qp_dscp < -1 || in.qp_dscp > 63 ||
      in.hop_count > CRUX_ROUTE_HOPS || in.port_count > CRUX_ROUTE_PORTS) {
    return std::nullopt;
  }
  Route route;
  route.destination = *destination;
  route.dscp = in.dscp;
  route.qp_dscp = in.qp_dscp;
  route.overrides = in.overrides != 0;
  route.rate_Bps = in.rate_Bps;
  for (const crux_hop* hop = in.hops; hop != in.hops + in.hop_count; ++hop) {
    const auto address = parse(hop->address);
    if (!address || hop->ttl < 1 || hop->ttl > 255) return std::nullopt;
    route.add_hop(hop->ttl, *address);
  }
  route.udp_ports.assign(in.ports, in.ports + in.port_count);
  return route;
}

// True if a symbol of this process resolves into this library.
bool is_ours(const char* symbol) {
  Dl_info found, ours;
  return ::dladdr(::dlsym(RTLD_DEFAULT, symbol), &found) != 0 &&
         ::dladdr(reinterpret_cast<const void*>(&crux_transport_abi), &ours) != 0 &&
         found.dli_fbase == ours.dli_fbase;
}

int set_socket(int fd, uint64_t inode, int32_t dscp, uint64_t rate_Bps,
               crux_socket_setting& setting) {
  const Descriptor socket = borrow(fd, inode);
  if (!socket) return errno;
  if (!is_tcp(socket.get())) return ENOPROTOOPT;
  const auto peer = peer_endpoint(socket.get());
  if (!peer) return errno;
  const bool ipv6 = !peer->address.is_v4();
  const SocketOptions before{tos(socket.get(), ipv6), pacing_Bps(socket.get())};
  const bool paces = rate_Bps != UINT64_MAX;
  int error = dscp < 0 ? 0 : set_dscp(socket.get(), ipv6, dscp);
  if (paces && rate_Bps != before.rate_Bps) {
    const int refused = set_pacing(socket.get(), rate_Bps);
    if (error == 0) error = refused;
  }
  SocketOptions original = before;
  if (Transport* const known = transport()) {
    original = known->registry->original(fd, inode, before);
    if (dscp >= 0 || paces) known->registry->set_live(fd, inode, *peer, before, error);
  }
  setting = {original.tos,      before.tos,      tos(socket.get(), ipv6),
             original.rate_Bps, before.rate_Bps, pacing_Bps(socket.get())};
  return error;
}

}  // namespace

__attribute__((weak)) bool sees_queue_pairs() { return false; }
__attribute__((weak)) void list_queue_pairs(std::vector<crux_connection>&) {}

}  // namespace crux::transport

using crux::transport::Inside;
using crux::transport::transport;

int crux_transport_abi(void) { return CRUX_TRANSPORT_ABI; }

int crux_transport_sees_sockets(void) {
  if (transport() == nullptr || !transport()->enabled) return false;
  // Another preloaded library may come before this one and pass calls on.
  return crux::transport::is_ours("connect") || transport()->called;
}

int crux_transport_sees_queue_pairs(void) { return crux::transport::sees_queue_pairs(); }

int crux_transport_set_routes(const crux_route* routes, size_t count) try {
  const Inside inside;
  if (transport() == nullptr) return ENOMEM;
  std::vector<crux::transport::Route> read;
  for (const crux_route* one = routes; one != routes + count; ++one) {
    auto route = crux::transport::to_route(*one);
    if (!route) return EINVAL;
    read.push_back(std::move(*route));
  }
  transport()->routes.replace(std::move(read));
  return 0;
} catch (const std::bad_alloc&) {
  return ENOMEM;
}

int crux_transport_set_port_range(uint16_t first, uint16_t last) {
  if (transport() == nullptr || first < 1024 || first > last) return EINVAL;
  transport()->routes.set_ports({first, last});
  return 0;
}

int crux_transport_skip_ports(const uint16_t* ports, size_t count) {
  if (transport() == nullptr) return ENOMEM;
  for (const uint16_t* port = ports; port != ports + count; ++port) transport()->routes.skip(*port);
  return 0;
}

size_t crux_transport_connections(crux_connection* out, size_t capacity) try {
  const Inside inside;
  if (transport() == nullptr) return 0;
  std::vector<crux_connection> open = transport()->registry->list();
  crux::transport::list_queue_pairs(open);
  std::copy_n(open.begin(), std::min(capacity, open.size()), out);
  return open.size();
} catch (const std::bad_alloc&) {
  return 0;
}

int crux_transport_set_socket(int fd, uint64_t inode, int32_t dscp, uint64_t rate_Bps,
                              crux_socket_setting* setting) try {
  const Inside inside;
  crux_socket_setting read{-1, -1, -1, UINT64_MAX, UINT64_MAX, UINT64_MAX};
  const int error =
      dscp > 63 ? EINVAL : crux::transport::set_socket(fd, inode, dscp, rate_Bps, read);
  if (setting != nullptr) *setting = read;
  return error;
} catch (const std::bad_alloc&) {
  return ENOMEM;
}

// verbs/ overrides these if it is built.
extern "C" {

__attribute__((weak)) int crux_transport_label(int32_t, const char*, int32_t) { return ENOSYS; }
__attribute__((weak)) int crux_transport_change_queue_pair(uint64_t, uint32_t, uint64_t,
                                                           crux_queue_pair_outcome*) {
  return ENOSYS;
}

}  // extern "C"
