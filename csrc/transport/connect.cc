// connect(), accept() and accept4() of this process. Every TCP connection is recorded. Those of
// collective libraries get the path, the class and the rate of their route.
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "inside.h"
#include "path_probe.h"
#include "real_calls.h"
#include "tcp_socket.h"
#include "transport.h"

namespace crux::transport {
namespace {

// From bind() to connect() no other socket may share the source port: two connections can't have
// the same addresses and ports, and the second one would fail.
class Exclusive {
 public:
  explicit Exclusive(int fd) : fd_(fd) {}

  void begin() {
    for (size_t i = 0; i < kOptions.size(); ++i) {
      const bool is_on = get_option(fd_, SOL_SOCKET, kOptions[i]).value_or(0) != 0;
      cleared_[i] = is_on && set_option(fd_, SOL_SOCKET, kOptions[i], 0);
    }
  }
  void end() {
    for (size_t i = 0; i < kOptions.size(); ++i) {
      if (std::exchange(cleared_[i], false)) set_option(fd_, SOL_SOCKET, kOptions[i], 1);
    }
  }

 private:
  static constexpr std::array<int, 2> kOptions = {SO_REUSEADDR, SO_REUSEPORT};

  int fd_;
  std::array<bool, 2> cleared_{};
};

// The peer that a program names. Its pointer may lead anywhere, so the kernel copies what is there.
std::optional<Endpoint> named_peer(const sockaddr* address, socklen_t size) {
  sockaddr_storage storage;
  const size_t most = std::min<size_t>(size, sizeof(sockaddr_in6));
  if (address == nullptr) return std::nullopt;
  const iovec from{const_cast<sockaddr*>(address), most}, to{&storage, most};
  const ssize_t copied = ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0);
  if (copied >= 0 || errno == EFAULT) {
    if (copied != static_cast<ssize_t>(most)) return std::nullopt;
  } else {
    std::memcpy(&storage, address, most);  // a sandbox forbids the call
  }
  return Endpoint::from(reinterpret_cast<const sockaddr*>(&storage), static_cast<socklen_t>(most));
}

// The path of the object that `address` belongs to, or null.
const char* object_of(const void* address) {
#if __GLIBC_PREREQ(2, 35)
  // Unlike dladdr() it takes no lock, so a library's constructor may wait for a connection that
  // another thread makes.
  dl_find_object found;
  if (_dl_find_object(const_cast<void*>(address), &found) != 0) return nullptr;
  return found.dlfo_link_map->l_name;
#else
  Dl_info found;
  return ::dladdr(address, &found) == 0 ? nullptr : found.dli_fname;
#endif
}

Name library_of(const void* caller) {
  const char* const path = object_of(caller);
  if (path == nullptr) return {};
  if (*path == '\0') return to_name(program_invocation_short_name);
  const char* const slash = std::strrchr(path, '/');
  return to_name(slash == nullptr ? path : slash + 1);
}

bool is_collective(const Name& library) {
  const std::string_view name(library.data());
  constexpr std::array<std::string_view, 3> kPrefixes = {"libtorch", "libgloo", "libnccl"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(), [&](std::string_view prefix) {
    return name.substr(0, prefix.size()) == prefix;
  });
}

// Processes that connect to the same peer at the same time should not try the same ports.
uint16_t first_candidate() {
  static std::atomic<uint32_t> turn{0};
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const uint32_t mixed = static_cast<uint32_t>(now.tv_nsec) ^
                         static_cast<uint32_t>(::getpid()) * 2654435761u ^ turn.fetch_add(97);
  return static_cast<uint16_t>(mixed ^ mixed >> 16);
}

// Binds `fd` to a source port that takes the route's path.
void steer(int fd, const Endpoint& local, const Route& route, Transport& transport,
           Exclusive& exclusive, Record& record) {
  record.error = route.failures->error();
  if (record.error != 0) return;
  const bool ipv6 = !record.peer.address.is_v4();
  // Automatic flow labels are random, and part of many switches' hash.
  if (ipv6) set_option(fd, IPPROTO_IPV6, IPV6_AUTOFLOWLABEL, 0);
  exclusive.begin();
  const int family = get_option(fd, SOL_SOCKET, SO_DOMAIN).value_or(AF_UNSPEC);
  const auto claim = [&](uint16_t port) {
    Endpoint wanted = local;
    wanted.port = port;
    const SocketAddress address(wanted, family);
    return ::bind(fd, address.get(), address.size()) == 0;
  };
  ProbedConnection probed;
  probed.local = local;
  if (local.address.is_any()) {
    const uint8_t any[16] = {};
    probed.local.address = ipv6 ? Address::v6(any) : Address::v4(any);
  }
  probed.peer = record.peer;
  probed.tos = std::max(0, tos(fd, ipv6));
  probed.device = get_option(fd, SOL_SOCKET, SO_BINDTOIFINDEX).value_or(0);
  const PathFound found = find_port(probed, route, transport.routes, first_candidate(),
                                    transport.limits, std::ref(claim));
  record.probes = found.probes;
  record.via_ttl = found.via_ttl;
  record.via = found.via;
  record.error = found.error;
  // Ports that are all in use now may be free in a moment.
  if (found.port == 0 && found.error != EADDRINUSE) route.failures->remember(found.error);
}

// In one write(), and without the heap: a signal handler may connect.
void log(const Record& record, const Route& route) {
  char peer[CRUX_ADDRESS_CHARS], via[CRUX_ADDRESS_CHARS] = "-", line[512];
  record.peer.address.write(peer, sizeof peer);
  if (record.via_ttl != 0) record.via.write(via, sizeof via);
  const int size = std::snprintf(
      line, sizeof line,
      "crux_transport: %s to %s port %u: %s, via %s, %u probes, dscp %d, rate %llu B/s, errno %d\n",
      record.owner.data(), peer, record.peer.port,
      record.how == CRUX_REFUSED ? "not as wanted" : "as wanted", via, record.probes, route.dscp,
      static_cast<unsigned long long>(route.rate_Bps), record.error);
  if (::write(STDERR_FILENO, line, std::min<size_t>(size, sizeof line - 1)) < 0) return;
}

// Sets class and rate; the record gets the first error.
void set_options(int fd, const Route& route, Record& record) {
  const bool ipv6 = !record.peer.address.is_v4();
  record.original = {tos(fd, ipv6), pacing_Bps(fd)};
  if (route.dscp >= 0) record.error = set_dscp(fd, ipv6, route.dscp);
  if (route.rate_Bps != kUnlimited_Bps) {
    const int refused = set_pacing(fd, route.rate_Bps);
    if (record.error == 0) record.error = refused;
  }
}

// Applies the route to a connection that is about to be made.
void prepare(int fd, const Route& route, Transport& transport, Exclusive& exclusive,
             Record& record) {
  set_options(fd, route, record);
  const int error = std::exchange(record.error, 0);
  if (!route.hops.empty()) {
    const auto local = local_endpoint(fd);
    if (!local) {
      record.error = errno;
    } else if (local->port != 0) {
      record.error = EINVAL;  // bound by its program
    } else {
      steer(fd, *local, route, transport, exclusive, record);
    }
  }
  if (record.error == 0) record.error = error;
  record.how = record.error == 0 ? CRUX_AT_CONNECT : CRUX_REFUSED;
  if (transport.log) log(record, route);
}

// Returns the record of a connection that is about to be made; no inode if it is not recorded.
Record before_connect(int fd, const sockaddr* address, socklen_t size, const void* caller,
                      Transport& transport, Exclusive& exclusive) {
  Record record;
  transport.called = true;
  const auto inode = socket_inode(fd);
  const auto peer = named_peer(address, size);
  // A repeated call, to ask for the state of an attempt or to try again, is no new connection.
  if (!inode || !peer || !is_tcp(fd) || transport.registry->has(fd, *inode)) return record;
  record.inode = *inode;
  record.peer = *peer;
  record.owner = library_of(caller);
  const bool ours = transport.steer_all || is_collective(record.owner);
  if (ours && !transport.routes.skipped(peer->port)) {
    if (const Routes::Held route = transport.routes.to(peer->address)) {
      prepare(fd, *route, transport, exclusive, record);
    }
  }
  return record;
}

// A thread may be cancelled in the real call. It then unwinds through this function, with another
// unwinder than the one that is linked in here, so nothing in it may have a destructor.
int interposed_connect(int fd, const sockaddr* address, socklen_t size, const void* caller) {
  const auto real = real_connect();
  Transport* const transport = crux::transport::transport();
  if (transport == nullptr || !transport->enabled) return real(fd, address, size);
  Exclusive exclusive(fd);
  Record record;
  Outside outside = enter();
  if (!outside.is_inside) {
    record = before_connect(fd, address, size, caller, *transport, exclusive);
  }
  leave(outside);
  const int result = real(fd, address, size);
  if (record.inode == 0) return result;
  outside = enter();
  exclusive.end();
  // After a signal the attempt goes on.
  const bool under_way = result == 0 || outside.error == EINPROGRESS || outside.error == EINTR;
  if (under_way || record.how != CRUX_UNTOUCHED) transport->registry->add(fd, record);
  leave(outside);
  return result;
}

void add_accepted(int fd, const void* caller, Transport& transport) {
  const auto inode = socket_inode(fd);
  if (!inode || !is_tcp(fd)) return;
  Record record;
  record.inode = *inode;
  if (const auto peer = peer_endpoint(fd)) record.peer = *peer;
  record.owner = library_of(caller);
  record.accepted = true;
  const auto local = transport.steer_all ? local_endpoint(fd) : std::nullopt;
  if (local && !transport.routes.skipped(local->port)) {
    if (const Routes::Held route = transport.routes.to(record.peer.address)) {
      set_options(fd, *route, record);
      record.how = record.error == 0 ? CRUX_LIVE_OPTION : CRUX_REFUSED;
      if (transport.log) log(record, *route);
    }
  }
  transport.registry->add(fd, record);
}

int accepted(int fd, const void* caller) {
  Transport* const transport = crux::transport::transport();
  if (fd < 0 || transport == nullptr || !transport->enabled) return fd;
  const Outside outside = enter();
  if (!outside.is_inside) add_accepted(fd, caller, *transport);
  leave(outside);
  return fd;
}

}  // namespace

}  // namespace crux::transport

// The libc headers declare these without noexcept, because each is a cancellation point.
#define CRUX_INTERPOSES extern "C" __attribute__((visibility("default"), noinline))

CRUX_INTERPOSES int connect(int fd, const sockaddr* address, socklen_t size) {
  return crux::transport::interposed_connect(fd, address, size, __builtin_return_address(0));
}

CRUX_INTERPOSES int accept(int fd, sockaddr* address, socklen_t* size) {
  return crux::transport::accepted(crux::transport::real_accept()(fd, address, size),
                                   __builtin_return_address(0));
}

CRUX_INTERPOSES int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  return crux::transport::accepted(crux::transport::real_accept4()(fd, address, size, flags),
                                   __builtin_return_address(0));
}
