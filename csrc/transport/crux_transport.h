// libcrux_transport.so: the connections of this process, and the settings that a plan gives them.
//
// A C interface without torch. If it is preloaded (LD_PRELOAD), it sees every TCP connection being
// made and, through the stand-in for libibverbs, every queue pair. If it is loaded later, it can
// still set options of live connections. Every function may be called from any thread.
//
// It fails open: no connection fails that would have succeeded without it.
//
// Read from the environment once, when it is loaded (programs with a Python face need none of it):
//   CRUX_TRANSPORT_ROUTES=FILE    routes, one a line; route_file.h has the format
//   CRUX_TRANSPORT_ROUTE_LINES=TEXT   the routes themselves, in place of a file
//   CRUX_TRANSPORT_SKIP_PORTS=N,N     as crux_transport_skip_ports(); also of accepted connections
//   CRUX_TRANSPORT_STEER_ALL=1    steer every program's connections, not only collective libraries'
//   CRUX_PORTS=A-B                as crux_transport_set_port_range()
//   CRUX_TRANSPORT_PROBE_MS=N     milliseconds that probing may add to one connect(), default 250;
//                                 that of a non-blocking socket included
//   CRUX_TRANSPORT_LOG=1          a line on stderr for each connection that has a route
//   CRUX_TRANSPORT=0, CRUX_DISABLE=1   see nothing, change nothing
//   MASTER_PORT, PET_RDZV_ENDPOINT, CRUX_STORE   their ports are rendezvous stores'
//   CRUX_LD_PRELOAD_THEN=LIST     what LD_PRELOAD becomes in a Python interpreter (cruxrun sets it)
#ifndef CRUX_TRANSPORT_H
#define CRUX_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define CRUX_TRANSPORT_ABI 6
#define CRUX_ADDRESS_CHARS 46
#define CRUX_NAME_CHARS 64
#define CRUX_ROUTE_HOPS 16
#define CRUX_ROUTE_PORTS 64

// An address that may answer at a hop.
struct crux_hop {
  int32_t ttl;
  char address[CRUX_ADDRESS_CHARS];
};

// The settings that a plan gives to the connections of this process to one address.
struct crux_route {
  char destination[CRUX_ADDRESS_CHARS];
  int32_t dscp;       // of sockets, 0 to 63; -1: leave as it is
  int32_t qp_dscp;    // of queue pairs that asked for DSCP 0; -1: leave as it is
  int32_t overrides;  // 1: of all queue pairs, whatever they asked for
  uint64_t rate_Bps;  // 0: no limit
  // The path: at each listed TTL, one of the addresses listed with it has to answer. None: any
  // path.
  uint32_t hop_count;
  struct crux_hop hops[CRUX_ROUTE_HOPS];
  // UDP source ports that are known to lead over the path (RoCEv2, destination port 4791).
  uint32_t port_count;
  uint16_t ports[CRUX_ROUTE_PORTS];
};

enum crux_kind { CRUX_TCP = 1, CRUX_QP = 2 };

// The way in which a connection got its settings.
enum crux_how {
  CRUX_UNTOUCHED = 0,
  CRUX_AT_CONNECT = 1,      // source port bound, options set before connect()
  CRUX_AT_RTR = 2,          // address vector rewritten on the way to RTR
  CRUX_LIVE_OPTION = 3,     // socket option on the live connection
  CRUX_LIVE_DEVICE = 4,     // the device's own call on the live queue pair (mlx5)
  CRUX_NEEDS_HANDOVER = 5,  // only a new connection can have what is wanted
  // At least one setting failed; `error` says why. If it was the search for a path: ETIMEDOUT,
  // nobody answered; EHOSTUNREACH, only other paths did; EADDRINUSE, no source port was left;
  // ERANGE, a listed TTL reaches the destination itself; ENOTUNIQ, one source port got answers from
  // several paths, so packets are sprayed. After a failed search there is no other search for that
  // destination for 10 s, or until the next routes.
  CRUX_REFUSED = 6
};

struct crux_connection {
  uint64_t id;  // of a socket its inode; of a queue pair a number that is never used again
  int32_t kind;
  int32_t how;
  int32_t error;                 // errno of the last setting that failed, 0 after one that did not
  int32_t fd;                    // of a socket
  char owner[CRUX_NAME_CHARS];   // of a queue pair: by its label; of a socket: the library
  char device[CRUX_NAME_CHARS];  // of a queue pair
  char local[CRUX_ADDRESS_CHARS];
  char peer[CRUX_ADDRESS_CHARS];
  uint16_t local_port;  // TCP; of a queue pair the UDP source port, 0 where it is not known
  uint16_t peer_port;
  uint32_t qpn, peer_qpn, flow_label;
  int32_t dscp;       // -1: not known
  int32_t state;      // of a queue pair: enum ibv_qp_state
  uint64_t rate_Bps;  // 0: no limit set
  // TCP: without retransmissions. Queue pairs: what was posted by ibv_post_send(), and 0.
  uint64_t bytes_sent, bytes_received;
  uint32_t probes;  // sent to find its path
  int32_t via_ttl;  // the last hop that was probed, 0 without a probe, and who answered there
  char via[CRUX_ADDRESS_CHARS];
  int32_t accepted;  // 1: a socket that was seen to be accepted; its port is the other end's choice
};

// The settings of a live socket before and after a call. TOS also means the IPv6 traffic class. -1
// and UINT64_MAX: could not be read.
struct crux_socket_setting {
  int32_t original_tos;  // before this library first set anything of it, at connect() or live
  int32_t before_tos, after_tos;
  uint64_t original_rate_Bps, before_rate_Bps, after_rate_Bps;  // 0: no limit
};

int crux_transport_abi(void);
// 1 if connect(), or ibv_modify_qp(), of this process goes through this library; else 0.
int crux_transport_sees_sockets(void);
int crux_transport_sees_queue_pairs(void);

// Replaces the routes for connections that are made from now on. If two routes have the same
// destination, the later one counts. 0, ENOMEM, or EINVAL for a value that can't be used (then
// nothing changes).
int crux_transport_set_routes(const struct crux_route* routes, size_t count);
// TCP source ports to choose from, inclusive, at least 1024; default 20000 to 28999, below Linux'
// ephemeral ports and torch's rendezvous ports. Ports in use, and those of
// crux_transport_skip_ports(), are left out. 0, or EINVAL.
int crux_transport_set_port_range(uint16_t first, uint16_t last);
// Destination ports that are never steered: rendezvous stores.
int crux_transport_skip_ports(const uint16_t* ports, size_t count);
// The open connections; returns how many there are, of which the first `capacity` were written.
size_t crux_transport_connections(struct crux_connection* out, size_t capacity);

// Sets DSCP (-1: leave; the two ECN bits stay) and pacing (UINT64_MAX: leave, 0: no limit) of the
// live socket `inode`, known as `fd` when it was found. Works for any TCP socket of this process;
// with nothing to set it only reads. `setting` may be null.
// 0, ENOENT where fd does not name that socket any more, or the errno of the call that failed.
int crux_transport_set_socket(int fd, uint64_t inode, int32_t dscp, uint64_t rate_Bps,
                              struct crux_socket_setting* setting);

// Queue pairs. They are seen if libibverbs is the stand-in (crux_torch/apply/verbs_shim.py). If
// this library was built without <infiniband/verbs.h>, the calls below return ENOSYS.
//
// When a queue pair goes to RTR, it gets the traffic class and the flow label (hence the UDP source
// port) of its label, or of the route to its peer. If the route has several ports, the n-th queue
// pair takes the n-th. A label's class goes before the route's class.

// Queue pairs that connect with traffic class `label` (1 to 255: NCCL's trafficClass) from now on
// belong to `owner`, and send with `dscp` and the label's two ECN bits. -1: with the label itself.
// 0, or EINVAL.
int crux_transport_label(int32_t label, const char* owner, int32_t dscp);

struct crux_queue_pair_outcome {
  int32_t how;      // enum crux_how
  int32_t error;    // as returned
  char reason[96];  // why the change was not made; else empty
};

// Changes a queue pair that is in use, by the device's own call (mlx5).
//   udp_port   49152 to 65535; 0: leave
//   rate_Bps   UINT64_MAX: leave; 0: no limit
// 0, ENOENT, EINVAL, ENOTCONN, or the errno of the device; EOPNOTSUPP if it has no such call. If
// only a new connection can have the port, `how` is CRUX_NEEDS_HANDOVER. `outcome` may be null.
int crux_transport_change_queue_pair(uint64_t id, uint32_t udp_port, uint64_t rate_Bps,
                                     struct crux_queue_pair_outcome* outcome);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
