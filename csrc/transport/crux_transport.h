// libcrux_transport.so: the connections of this process, and what a plan says of them.
//
// Plain C, no torch. Loaded before the training process starts (LD_PRELOAD), it sees every TCP
// connection being made and, through the stand-in for libibverbs, every queue pair. Loaded later it
// can still set options of live connections. Every function may be called from any thread.
//
// Fail open: nothing here makes a connection fail that would have succeeded without it.
//
// Read from the environment once, when it is loaded (programs with a Python face need none of it):
//   CRUX_TRANSPORT_ROUTES=FILE    routes, one a line; route_file.h has the format
//   CRUX_TRANSPORT_STEER_ALL=1    steer any program's connections, not just collective libraries'
//   CRUX_PORTS=A-B                as crux_transport_set_port_range()
//   CRUX_TRANSPORT_PROBE_MS=N     milliseconds that probing may add to one connect(), default 250;
//                                 that of a non-blocking socket included
//   CRUX_TRANSPORT_LOG=1          a line on stderr for each connection that has a route
//   CRUX_TRANSPORT=0, CRUX_DISABLE=1   see nothing, change nothing
//   MASTER_PORT, PET_RDZV_ENDPOINT, CRUX_STORE   their ports are rendezvous stores'
#ifndef CRUX_TRANSPORT_H
#define CRUX_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define CRUX_TRANSPORT_ABI 3
#define CRUX_ADDRESS_CHARS 46
#define CRUX_NAME_CHARS 64
#define CRUX_ROUTE_HOPS 16
#define CRUX_ROUTE_PORTS 64

// One address that may answer at one hop.
struct crux_hop {
  int32_t ttl;
  char address[CRUX_ADDRESS_CHARS];
};

// What a plan wants of the connections of this process to one address.
struct crux_route {
  char destination[CRUX_ADDRESS_CHARS];
  int32_t dscp;       // 0 to 63; -1: leave as it is
  uint64_t rate_Bps;  // 0: no limit
  // The path: at each TTL that is listed here, one of the addresses listed with it. None: any path.
  uint32_t hop_count;
  struct crux_hop hops[CRUX_ROUTE_HOPS];
  // UDP source ports that are known to lead over the path (RoCEv2, destination port 4791).
  uint32_t port_count;
  uint16_t ports[CRUX_ROUTE_PORTS];
};

enum crux_kind { CRUX_TCP = 1, CRUX_QP = 2 };

// How a connection got the settings that it has.
enum crux_how {
  CRUX_UNTOUCHED = 0,
  CRUX_AT_CONNECT = 1,    // source port bound, options set before connect()
  CRUX_AT_RTR = 2,        // address vector rewritten on the way to RTR
  CRUX_LIVE_OPTION = 3,   // socket option on the live connection
  CRUX_LIVE_DEVICE = 4,   // the device's own call on the live queue pair (mlx5)
  CRUX_LIVE_RESET = 5,    // drained, RESET, INIT, RTR, RTS with the PSNs continued
  CRUX_NEEDS_SWITCH = 6,  // only a new connection can have what is wanted
  // Not all that was wanted could be had: see `error`. Of a path that was probed for: ETIMEDOUT
  // where nobody answered, EHOSTUNREACH where only other paths did, EADDRINUSE where no source port
  // was left, ERANGE where a listed TTL reaches the destination itself. After a search in vain the
  // next connections to that destination are not searched for, for 10 s or until the next routes.
  CRUX_REFUSED = 7
};

struct crux_connection {
  uint64_t id;  // of a socket its inode; of a queue pair a number that is never used again
  int32_t kind;
  int32_t how;
  int32_t error;                 // errno of the last setting that failed, 0 after one that did not
  int32_t fd;                    // of a socket
  char owner[CRUX_NAME_CHARS];   // communicator, where known; else the library that connected
  char device[CRUX_NAME_CHARS];  // of a queue pair
  char local[CRUX_ADDRESS_CHARS];
  char peer[CRUX_ADDRESS_CHARS];
  uint16_t local_port;  // TCP; of a queue pair the UDP source port, 0 where it is not known
  uint16_t peer_port;
  uint32_t qpn, peer_qpn, flow_label;
  int32_t dscp;                         // -1: not known
  int32_t state;                        // of a queue pair: enum ibv_qp_state
  uint64_t rate_Bps;                    // 0: no limit set
  uint64_t bytes_sent, bytes_received;  // TCP: without repeats; queue pairs: posted
  uint32_t probes;                      // sent to find its path
  int32_t via_ttl;  // the last hop that was probed, 0 without a probe, and who answered there
  char via[CRUX_ADDRESS_CHARS];
  int32_t accepted;  // 1: a socket that was seen to be accepted; its port is the other end's choice
};

// What a live socket had and has; TOS stands for the IPv6 traffic class too. -1 and UINT64_MAX:
// could not be read.
struct crux_socket_setting {
  int32_t original_tos;  // before this library first set anything of it, at connect() or live
  int32_t before_tos, after_tos;
  uint64_t original_rate_Bps, before_rate_Bps, after_rate_Bps;  // 0: no limit
};

int crux_transport_abi(void);
// Whether connect() of this process goes through this library, and whether ibv_modify_qp() does.
int crux_transport_sees_sockets(void);
int crux_transport_sees_queue_pairs(void);

// Replaces the routes; they count for connections that are made from now on. Of two routes to one
// destination the later counts. 0, ENOMEM, or EINVAL for a value that can't be used (then nothing
// changes).
int crux_transport_set_routes(const struct crux_route* routes, size_t count);
// TCP source ports to choose from, inclusive, at least 1024; default 20000 to 28999, below Linux'
// ephemeral ports and torch's rendezvous ports. Ports in use, and those of
// crux_transport_skip_ports(), are left out. 0, or EINVAL.
int crux_transport_set_port_range(uint16_t first, uint16_t last);
// Destination ports that are never steered: rendezvous stores.
int crux_transport_skip_ports(const uint16_t* ports, size_t count);
// Connections that this thread makes until the matching pop belong to `owner`, and are steered
// whichever library makes them. May be nested.
void crux_transport_push_owner(const char* owner);
void crux_transport_pop_owner(void);

// The open connections; returns how many there are, of which the first `capacity` were written.
size_t crux_transport_connections(struct crux_connection* out, size_t capacity);

// Sets DSCP (-1: leave; the two ECN bits stay) and pacing (UINT64_MAX: leave, 0: no limit) of the
// live socket `inode`, known as `fd` when it was found. Works for any TCP socket of this process;
// with nothing to set it only reads. `setting` may be null.
// 0, ENOENT where fd does not name that socket any more, or the errno of the call that failed.
int crux_transport_set_socket(int fd, uint64_t inode, int32_t dscp, uint64_t rate_Bps,
                              struct crux_socket_setting* setting);

// ---- Queue pairs -------------------------------------------------------------------------------
//
// Seen where libibverbs is the stand-in (crux_torch/apply/standin.py); else, and where this library
// was built without <infiniband/verbs.h>, the calls below return ENOSYS.
//
// On the way to RTR a queue pair gets the traffic class and the flow label (hence the UDP source
// port) of its label or of the route to its peer: of several ports the n-th queue pair takes the
// n-th. A label goes before the route's class.

// Queue pairs that are connected with traffic class `label` (1 to 255: NCCL's trafficClass) belong
// to `owner` and go out with `dscp` and the label's two ECN bits; -1: with the label itself.
// Counts from now on. 0, or EINVAL.
int crux_transport_label(int32_t label, const char* owner, int32_t dscp);

// Devices opened from now on are followed (CRUX_LIVE_QP=1: from the start): what is
// posted and polled goes through this library, without which a queue pair in use can't be emptied.
// Costs two uncontended locks for each call; devices that are open already are not touched.
int crux_transport_follow_queue_pairs(int on);

// A queue pair in use may be reset: the one with this id, or with id 0 all of `owner`, "*" being
// all of the process. 0, ENOENT, EINVAL. Whoever allows it promises that
//  - while it is changed nobody sends to it: its peer is held (crux_transport_hold), or is silent
//  by
//    the program's own design; a change looks twice and gives up with EBUSY where it sees a
//    message;
//  - posting and polling are ibv_post_send(), ibv_post_recv() and ibv_poll_cq() of this process;
//  - it has no settings from outside <infiniband/verbs.h> that a reset would lose;
//  - both ends' timeouts and retries bridge a few milliseconds.
int crux_transport_allow_reset(uint64_t id, const char* owner, int allow);

// Holds back what is sent from now on (up to what the send queue holds; then ENOMEM, as a full one
// gives) and waits until what was sent is done. Before a reset, hold both ends.
// 0; ETIMEDOUT (nothing is held then); EBUSY; ECANCELED where the program itself modified or
// released it; ENOTCONN; EOPNOTSUPP where it is not followed. A hold ends by itself after
// `lease_ms`.
int crux_transport_hold(uint64_t id, uint32_t timeout_ms, uint32_t lease_ms);
// 0, ENOENT, EBUSY, or EINVAL where it is not held.
int crux_transport_release(uint64_t id);

struct crux_queue_pair_change {
  int32_t dscp;         // -1: leave
  uint32_t udp_port;    // 49152 to 65535; 0: leave
  uint64_t rate_Bps;    // UINT64_MAX: leave; 0: no limit
  uint32_t timeout_ms;  // for what was sent to be done, where it is not held
};

struct crux_queue_pair_outcome {
  int32_t how;      // enum crux_how
  int32_t error;    // as returned
  int32_t applied;  // whether the new setting is in force; else the old one is
  uint64_t took_ns;
  char reason[96];  // why it is not
};

// Changes a live queue pair by the best means: the device's own call (mlx5: port, rate), else
// RESET, INIT, RTR, RTS with the packet numbers continued and the receives given back, where that
// is allowed. Where a step fails the old setting is restored; where the device refuses that too,
// all that waits is reported as flushed, as on any broken connection. 0, or an errno: EOPNOTSUPP
// and EPERM with how == CRUX_NEEDS_SWITCH; ETIMEDOUT, EBUSY, ECANCELED may be tried again; ENOENT;
// ENOTCONN; EINVAL. `outcome` may be null.
int crux_transport_change_queue_pair(uint64_t id, const struct crux_queue_pair_change* change,
                                     struct crux_queue_pair_outcome* outcome);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
