// Addresses of both families as one value type: an IPv4 address is kept as IPv4-mapped IPv6.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>

namespace crux::transport {

namespace internal {

inline constexpr std::array<uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

template <class T>
T read_as(const sockaddr* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

}  // namespace internal

struct Address {
  std::array<uint8_t, 16> bytes{};  // network order; all zero: any address

  static std::optional<Address> parse(const char* text) {
    uint8_t raw[16];
    if (inet_pton(AF_INET, text, raw) == 1) return v4(raw);
    if (inet_pton(AF_INET6, text, raw) == 1) return v6(raw);
    return std::nullopt;
  }
  static Address v4(const void* four_bytes) {
    Address address;
    std::copy(internal::kMapped.begin(), internal::kMapped.end(), address.bytes.begin());
    std::memcpy(&address.bytes[12], four_bytes, 4);
    return address;
  }
  static Address v6(const void* sixteen_bytes) {
    Address address;
    std::memcpy(address.bytes.data(), sixteen_bytes, 16);
    return address;
  }

  bool is_v4() const {
    return std::equal(internal::kMapped.begin(), internal::kMapped.end(), bytes.begin());
  }
  bool is_any() const {
    const auto zero = [](uint8_t byte) { return byte == 0; };
    return std::all_of(bytes.begin() + 12, bytes.end(), zero) &&
           (is_v4() || std::all_of(bytes.begin(), bytes.begin() + 12, zero));
  }  // of either family
  bool is_loopback() const { return is_v4() ? bytes[12] == 127 : *this == v6(&in6addr_loopback); }
  // Writes `size` characters at most, the terminating zero included.
  void write(char* out, size_t size) const {
    const bool v4 = is_v4();
    const void* raw = v4 ? &bytes[12] : bytes.data();
    if (inet_ntop(v4 ? AF_INET : AF_INET6, raw, out, static_cast<socklen_t>(size)) == nullptr &&
        size > 0) {
      out[0] = '\0';
    }
  }

  friend bool operator==(const Address& a, const Address& b) { return a.bytes == b.bytes; }
  friend bool operator!=(const Address& a, const Address& b) { return a.bytes != b.bytes; }
  friend bool operator<(const Address& a, const Address& b) { return a.bytes < b.bytes; }
};

struct Endpoint {
  Address address;
  uint16_t port = 0;
  uint32_t scope = 0;  // zone of a link-local IPv6 address

  // Nothing for any family but AF_INET and AF_INET6, or where `length` is too short for it.
  static std::optional<Endpoint> from(const sockaddr* address, socklen_t length) {
    if (address == nullptr || length < sizeof(sa_family_t)) return std::nullopt;
    Endpoint endpoint;
    if (address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
      const auto in = internal::read_as<sockaddr_in>(address);
      endpoint.address = Address::v4(&in.sin_addr);
      endpoint.port = ntohs(in.sin_port);
      return endpoint;
    }
    if (address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
      const auto in6 = internal::read_as<sockaddr_in6>(address);
      endpoint.address = Address::v6(&in6.sin6_addr);
      endpoint.port = ntohs(in6.sin6_port);
      endpoint.scope = in6.sin6_scope_id;
      return endpoint;
    }
    return std::nullopt;
  }
};

// An endpoint as the kernel takes it, for a socket of `family`.
class SocketAddress {
 public:
  SocketAddress(const Endpoint& endpoint, int family) {
    if (family == AF_INET) {
      sockaddr_in in{};
      in.sin_family = AF_INET;
      in.sin_port = htons(endpoint.port);
      std::memcpy(&in.sin_addr, &endpoint.address.bytes[12], 4);
      std::memcpy(&storage_, &in, size_ = sizeof in);
    } else {
      sockaddr_in6 in6{};
      in6.sin6_family = AF_INET6;
      in6.sin6_port = htons(endpoint.port);
      in6.sin6_scope_id = endpoint.scope;
      std::memcpy(&in6.sin6_addr, endpoint.address.bytes.data(), 16);
      std::memcpy(&storage_, &in6, size_ = sizeof in6);
    }
  }

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }

 private:
  sockaddr_storage storage_{};
  socklen_t size_;
};

}  // namespace crux::transport
