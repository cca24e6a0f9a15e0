#include "syn_probe.h"

#include <linux/errqueue.h>
#include <netinet/icmp6.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "real_calls.h"

namespace crux::transport {
namespace {

template <class T>
bool set_option(int fd, int level, int option, const T& value) {
  return ::setsockopt(fd, level, option, &value, sizeof value) == 0;
}

// A SYN that reaches the destination must not become a connection. A Linux host drops a SYN with an
// MD5 signature (RFC 2385) for which it has no key. Best effort.
void sign(int fd, const SocketAddress& peer) {
  tcp_md5sig signature{};
  std::memcpy(&signature.tcpm_addr, peer.get(), peer.size());
  signature.tcpm_keylen = 4;
  std::memcpy(signature.tcpm_key, "crux", 4);
  set_option(fd, IPPROTO_TCP, TCP_MD5SIG, signature);
}

// A socket whose packets live for `ttl` hops. Empty, with errno, if the kernel refuses.
Descriptor open_socket(const ProbedConnection& connection, int ttl, const SocketAddress& peer) {
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
std::optional<Address> expired_at(int fd) {
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

}  // namespace

int SynProbe::send(const ProbedConnection& connection, uint16_t port, int ttl) {
  const int family = connection.peer.address.is_v4() ? AF_INET : AF_INET6;
  const SocketAddress peer(connection.peer, family);
  Endpoint from = connection.local;
  from.port = port;
  const SocketAddress local(from, family);
  answer_ = Answer::kFailed;
  socket_ = open_socket(connection, ttl, peer);
  if (!socket_ || ::bind(socket_.get(), local.get(), local.size()) != 0) return error_ = errno;
  if (real_calls().connect(socket_.get(), peer.get(), peer.size()) == 0 || errno == ECONNREFUSED) {
    answer_ = Answer::kReached;
  } else if (errno == EINPROGRESS) {
    answer_ = Answer::kNone;
  } else {
    return error_ = errno == EADDRNOTAVAIL ? EADDRINUSE : errno;
  }
  return error_ = 0;
}

void SynProbe::read_answer() {
  if (const auto reporter = expired_at(socket_.get())) {
    answer_ = Answer::kHop;
    from_ = *reporter;
    return;
  }
  socklen_t size = sizeof error_;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error_, &size);
  const bool reached = error_ == 0 || error_ == ECONNREFUSED;
  answer_ = reached ? Answer::kReached : Answer::kFailed;
}

}  // namespace crux::transport
