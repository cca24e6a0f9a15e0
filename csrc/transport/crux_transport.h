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
//   CRUX_TRANSPORT_PROBE_MS=N     milliseconds that probing may add to one connect(), default 250
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

#define CRUX_TRANSPORT_ABI 2
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
  // was left, ERANGE where a listed TTL reaches the destination itself.
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

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
