// Addresses of both families as one value type: an IPv4 address is kept as IPv4-mapped IPv6.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>

namespace crux::transport {

struct Address {
  std::array<uint8_t, 16> bytes{};  // network order; all zero: any address

  static std::optional<Address> parse(const char* text);
  static Address v4(const void* four_bytes);
  static Address v6(const void* sixteen_bytes);

  bool is_v4() const;
  bool is_any() const;  // of either family
  // Writes `size` characters at most, the terminating zero included.
  void write(char* out, size_t size) const;

  friend bool operator==(const Address& a, const Address& b) { return a.bytes == b.bytes; }
  friend bool operator!=(const Address& a, const Address& b) { return a.bytes != b.bytes; }
  friend bool operator<(const Address& a, const Address& b) { return a.bytes < b.bytes; }
};

struct Endpoint {
  Address address;
  uint16_t port = 0;
  uint32_t scope = 0;  // zone of a link-local IPv6 address

  // Nothing for any family but AF_INET and AF_INET6, or where `length` is too short for it.
  static std::optional<Endpoint> from(const sockaddr* address, socklen_t length);
};

// An endpoint as the kernel takes it, for a socket of `family`.
class SocketAddress {
 public:
  SocketAddress(const Endpoint& endpoint, int family);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }

 private:
  sockaddr_storage storage_{};
  socklen_t size_;
};

}  // namespace crux::transport
