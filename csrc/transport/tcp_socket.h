// Options and state of TCP sockets, including live ones of other libraries.
#pragma once

#include <cstdint>
#include <optional>

#include "address.h"
#include "crux_transport.h"

namespace crux::transport {

// A file descriptor of our own, closed at the end. errno survives.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_;
};

// Nothing, with errno, if the kernel refuses.
template <class T = int>
std::optional<T> get_option(int fd, int level, int option) {
  T value{};
  socklen_t size = sizeof value;
  if (::getsockopt(fd, level, option, &value, &size) != 0) return std::nullopt;
  return value;
}
// False, with errno, if the kernel refuses.
template <class T>
bool set_option(int fd, int level, int option, const T& value) {
  return ::setsockopt(fd, level, option, &value, sizeof value) == 0;
}

constexpr uint64_t kUnlimited_Bps = 0;

// The inode of the socket `fd`; nothing if it is no socket.
std::optional<uint64_t> socket_inode(int fd);
bool is_tcp(int fd);
// A duplicate of the socket `inode`. Its owner may close it at any time, and `fd` may then name
// another socket, so the duplicate is checked. It shares its status flags with the original, so
// don't change them. Empty, with errno, if fd is another file (ENOENT) or no descriptor is left.
Descriptor borrow(int fd, uint64_t inode);

std::optional<Endpoint> local_endpoint(int fd);
std::optional<Endpoint> peer_endpoint(int fd);

// TOS of an IPv4 connection, traffic class of an IPv6 one; -1 with errno.
int tos(int fd, bool ipv6);
// The upper six bits replaced; the lower two are ECN.
inline constexpr int kEcnBits = 2;
constexpr int with_dscp(int tos, int dscp) {
  return dscp << kEcnBits | (tos & ((1 << kEcnBits) - 1));
}
// 0 or an errno.
int set_dscp(int fd, bool ipv6, int dscp);

// SO_MAX_PACING_RATE; kUnlimited_Bps for none, UINT64_MAX with errno if it can't be read.
uint64_t pacing_Bps(int fd);
// 0 or an errno.
int set_pacing(int fd, uint64_t rate_Bps);

// Fills in the live part of `out` (ends, class, rate, bytes); false if the connection has ended.
// The kernel knows no peer of a connection that is still being made; then `out` keeps its own.
bool describe(int fd, crux_connection& out);

}  // namespace crux::transport
