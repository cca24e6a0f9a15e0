#include "tcp_socket.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

namespace crux::transport {
namespace {

std::optional<Endpoint> endpoint_by(int (*call)(int, sockaddr*, socklen_t*), int fd) {
  sockaddr_storage storage;
  socklen_t size = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (call(fd, address, &size) != 0) return std::nullopt;
  return Endpoint::from(address, size);
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int Descriptor::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Descriptor::reset() {
  if (fd_ < 0) return;
  const int before = errno;
  ::close(release());
  errno = before;
}

std::optional<uint64_t> socket_inode(int fd) {
  struct stat status;
  // Inode numbers of other file systems could be the same.
  if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return std::nullopt;
  return status.st_ino;
}

bool is_tcp(int fd) { return get_option(fd, SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP; }

Descriptor borrow(int fd, uint64_t inode) {
  Descriptor duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!duplicate) {
    if (errno == EBADF || errno == EINVAL) errno = ENOENT;
    return duplicate;
  }
  if (socket_inode(duplicate.get()) != inode) {
    duplicate.reset();
    errno = ENOENT;
  }
  return duplicate;
}

std::optional<Endpoint> local_endpoint(int fd) { return endpoint_by(::getsockname, fd); }

std::optional<Endpoint> peer_endpoint(int fd) { return endpoint_by(::getpeername, fd); }

int tos(int fd, bool ipv6) {
  return (ipv6 ? get_option(fd, IPPROTO_IPV6, IPV6_TCLASS) : get_option(fd, IPPROTO_IP, IP_TOS))
      .value_or(-1);
}

int set_dscp(int fd, bool ipv6, int dscp) {
  const int before = tos(fd, ipv6);
  if (before < 0) return errno;
  const int wanted = with_dscp(before, dscp);
  if (wanted == before) return 0;
  const bool is_set = ipv6 ? set_option(fd, IPPROTO_IPV6, IPV6_TCLASS, wanted)
                           : set_option(fd, IPPROTO_IP, IP_TOS, wanted);
  return is_set ? 0 : errno;
}

uint64_t pacing_Bps(int fd) {
  uint64_t rate_Bps = 0;
  socklen_t size = sizeof rate_Bps;
  if (::getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate_Bps, &size) != 0) return UINT64_MAX;
  if (size == sizeof(uint32_t)) {  // kernels before 4.20
    uint32_t narrow = 0;
    ::getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &narrow, &(size = sizeof narrow));
    return narrow == UINT32_MAX ? kUnlimited_Bps : narrow;
  }
  return rate_Bps == UINT64_MAX ? kUnlimited_Bps : rate_Bps;
}

int set_pacing(int fd, uint64_t rate_Bps) {
  const uint64_t value = rate_Bps == kUnlimited_Bps ? UINT64_MAX : rate_Bps;
  return set_option(fd, SOL_SOCKET, SO_MAX_PACING_RATE, value) ? 0 : errno;
}

bool describe(int fd, crux_connection& out) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  // enum TCP_STATE of <netinet/tcp.h>, which <linux/tcp.h> excludes.
  constexpr int kClose = 7, kListen = 10;
  if (info.tcpi_state == kClose || info.tcpi_state == kListen) return false;
  bool ipv6 = false;
  if (const auto local = local_endpoint(fd)) {
    local->address.write(out.local, sizeof out.local);
    out.local_port = local->port;
    ipv6 = !local->address.is_v4();
  }
  if (const auto peer = peer_endpoint(fd)) {
    peer->address.write(out.peer, sizeof out.peer);
    out.peer_port = peer->port;
    ipv6 = !peer->address.is_v4();
  }
  const int current = tos(fd, ipv6);
  out.dscp = current < 0 ? -1 : current >> 2;
  const uint64_t rate_Bps = pacing_Bps(fd);
  out.rate_Bps = rate_Bps == UINT64_MAX ? kUnlimited_Bps : rate_Bps;
  out.bytes_received = info.tcpi_bytes_received;
  // Linux 4.19; the older tcpi_bytes_acked counts the SYN as a byte.
  const bool counts_sent = size >= offsetof(tcp_info, tcpi_dsack_dups);
  out.bytes_sent =
      counts_sent ? info.tcpi_bytes_sent - info.tcpi_bytes_retrans : info.tcpi_bytes_acked;
  return true;
}

}  // namespace crux::transport
