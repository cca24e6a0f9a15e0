#include "address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace crux::transport {
namespace {

constexpr std::array<uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

template <class T>
T read_as(const sockaddr* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

}  // namespace

Address Address::v4(const void* four_bytes) {
  Address address;
  std::copy(kMapped.begin(), kMapped.end(), address.bytes.begin());
  std::memcpy(&address.bytes[12], four_bytes, 4);
  return address;
}

Address Address::v6(const void* sixteen_bytes) {
  Address address;
  std::memcpy(address.bytes.data(), sixteen_bytes, 16);
  return address;
}

std::optional<Address> Address::parse(const char* text) {
  uint8_t raw[16];
  if (inet_pton(AF_INET, text, raw) == 1) return v4(raw);
  if (inet_pton(AF_INET6, text, raw) == 1) return v6(raw);
  return std::nullopt;
}

bool Address::is_v4() const { return std::equal(kMapped.begin(), kMapped.end(), bytes.begin()); }

bool Address::is_any() const {
  const auto zero = [](uint8_t byte) { return byte == 0; };
  return std::all_of(bytes.begin() + 12, bytes.end(), zero) &&
         (is_v4() || std::all_of(bytes.begin(), bytes.begin() + 12, zero));
}

void Address::write(char* out, size_t size) const {
  const bool v4 = is_v4();
  const void* raw = v4 ? &bytes[12] : bytes.data();
  if (inet_ntop(v4 ? AF_INET : AF_INET6, raw, out, static_cast<socklen_t>(size)) == nullptr &&
      size > 0) {
    out[0] = '\0';
  }
}

std::optional<Endpoint> Endpoint::from(const sockaddr* address, socklen_t length) {
  if (address == nullptr || length < sizeof(sa_family_t)) return std::nullopt;
  Endpoint endpoint;
  if (address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    const auto in = read_as<sockaddr_in>(address);
    endpoint.address = Address::v4(&in.sin_addr);
    endpoint.port = ntohs(in.sin_port);
    return endpoint;
  }
  if (address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
    const auto in6 = read_as<sockaddr_in6>(address);
    endpoint.address = Address::v6(&in6.sin6_addr);
    endpoint.port = ntohs(in6.sin6_port);
    endpoint.scope = in6.sin6_scope_id;
    return endpoint;
  }
  return std::nullopt;
}

SocketAddress::SocketAddress(const Endpoint& endpoint, int family) {
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

}  // namespace crux::transport
