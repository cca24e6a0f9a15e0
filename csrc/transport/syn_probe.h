// Sends one SYN whose TTL ends on its way, and tells which router dropped it.
#pragma once

#include <linux/errqueue.h>
#include <netinet/icmp6.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "address.h"
#include "real_calls.h"
#include "tcp_socket.h"

namespace crux::transport {

// The properties that a probe shares with the connection that it is for.
struct ProbedConnection {
  Endpoint local;  // its port does not matter; the address may be any
  Endpoint peer;
  int tos = 0;     // or IPv6 traffic class
  int device = 0;  // interface index that it is bound to, 0 for none
};

namespace internal {

// A SYN that reaches the destination must not become a connection. A Linux host drops a SYN with an
// MD5 signature (RFC 2385) for which it has no key. Best effort.
inline void sign(int fd, const SocketAddress& peer) {
  tcp_md5sig signature{};
  std::memcpy(&signature.tcpm_addr, peer.get(), peer.size());
  signature.tcpm_keylen = 4;
  std::memcpy(signature.tcpm_key, "crux", 4);
  set_option(fd, IPPROTO_TCP, TCP_MD5SIG, signature);
}

// A socket whose packets live for `ttl` hops. Empty, with errno, if the kernel refuses.
inline Descriptor open_socket(const ProbedConnection& connection, int ttl,
                              const SocketAddress& peer) {
  const bool ipv6 = !connection.peer.address.is_v4();
  const int level = ipv6 ? int{IPPROTO_IPV6} : int{IPPROTO_IP};
  const int on = 1, off = 0;
  Descriptor made(
      ::socket(ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
  const int fd = made.get();
  if (!made || !set_option(fd, level, ipv6 ? IPV6_UNICAST_HOPS : IP_TTL, ttl) ||
      !set_option(fd, level, ipv6 ? IPV6_RECVERR : IP_RECVERR, on)) {
    return Descriptor();
  }
  // Other fields that may decide the path. If the kernel refuses one, the probe goes without it.
  set_option(fd, level, ipv6 ? IPV6_TCLASS : IP_TOS, connection.tos);
  if (ipv6) set_option(fd, level, IPV6_AUTOFLOWLABEL, off);
  if (connection.device != 0) set_option(fd, SOL_SOCKET, SO_BINDTOIFINDEX, connection.device);
  sign(fd, peer);
  return made;
}

// The router that reported an expired SYN, if the error queue has such a report.
inline std::optional<Address> expired_at(int fd) {
  char data[128], control[512];
  iovec part{data, sizeof data};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (::recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return std::nullopt;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    const bool v4 = c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_RECVERR;
    const bool v6 = c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_RECVERR;
    if (!v4 && !v6) continue;
    sock_extended_err error;
    std::memcpy(&error, CMSG_DATA(c), sizeof error);
    const bool expired =
        (error.ee_origin == SO_EE_ORIGIN_ICMP && error.ee_type == ICMP_TIME_EXCEEDED) ||
        (error.ee_origin == SO_EE_ORIGIN_ICMP6 && error.ee_type == ICMP6_TIME_EXCEEDED);
    if (!expired) continue;
    const auto* reporter = reinterpret_cast<const sockaddr*>(CMSG_DATA(c) + sizeof error);
    const socklen_t size = v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (const auto end = Endpoint::from(reporter, size)) return end->address;
  }
  return std::nullopt;
}

}  // namespace internal

// An ordinary non-blocking connect() with a small TTL. The router that drops its SYN reports itself
// in the socket's error queue. This needs no privilege.
class SynProbe {
 public:
  enum class Answer {
    kNone,     // so far
    kHop,      // from() dropped it
    kReached,  // the destination itself answered
    kFailed    // error() was reported
  };

  // Sends it from source port `port`. 0, EADDRINUSE if the port is taken, or the errno of the call
  // that failed.
  int send(const ProbedConnection& connection, uint16_t port, int ttl) {
    const int family = connection.peer.address.is_v4() ? AF_INET : AF_INET6;
    const SocketAddress peer(connection.peer, family);
    Endpoint from = connection.local;
    from.port = port;
    const SocketAddress local(from, family);
    answer_ = Answer::kFailed;
    socket_ = internal::open_socket(connection, ttl, peer);
    if (!socket_ || ::bind(socket_.get(), local.get(), local.size()) != 0) return error_ = errno;
    if (real_connect()(socket_.get(), peer.get(), peer.size()) == 0 || errno == ECONNREFUSED) {
      answer_ = Answer::kReached;
    } else if (errno == EINPROGRESS) {
      answer_ = Answer::kNone;
    } else {
      return error_ = errno == EADDRNOTAVAIL ? EADDRINUSE : errno;
    }
    return error_ = 0;
  }
  // Descriptor for poll(): readable, writable or in error once the answer is there. -1: no answer
  // is expected.
  int waits_on() const { return answer_ == Answer::kNone ? socket_.get() : -1; }
  void read_answer() {
    if (const auto reporter = internal::expired_at(socket_.get())) {
      answer_ = Answer::kHop;
      from_ = *reporter;
      return;
    }
    error_ = get_option(socket_.get(), SOL_SOCKET, SO_ERROR).value_or(error_);
    const bool reached = error_ == 0 || error_ == ECONNREFUSED;
    answer_ = reached ? Answer::kReached : Answer::kFailed;
  }
  // Frees the port and keeps the answer.
  void close() { socket_.reset(); }

  Answer answer() const { return answer_; }
  int error() const { return error_; }
  const Address& from() const { return from_; }

 private:
  Descriptor socket_;
  Answer answer_ = Answer::kFailed;
  int error_ = 0;
  Address from_;
};

}  // namespace crux::transport
