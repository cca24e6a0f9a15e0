#include "wire.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace cuda_rig {
namespace {

// How often an abort is looked for, ms.
constexpr int kLookMs = 10;

void check(bool ok, const char* what) {
  if (ok) return;
  std::perror(what);
  std::abort();
}

unsigned own_ip() {
  const char* wanted = std::getenv("NCCL_SOCKET_IFNAME");
  if (wanted != nullptr && *wanted == '=') ++wanted;
  unsigned found = htonl(INADDR_LOOPBACK);
  if (wanted == nullptr || *wanted == '\0') return found;
  ifaddrs* all = nullptr;
  check(getifaddrs(&all) == 0, "cuda_rig: getifaddrs");
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    if (std::strcmp(each->ifa_name, wanted) != 0) continue;
    found = reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr;
  }
  freeifaddrs(all);
  return found;
}

sockaddr_in internet(const Listener::Address& of) {
  sockaddr_in found{};
  found.sin_family = AF_INET;
  found.sin_addr.s_addr = of.ip;
  found.sin_port = htons(of.port);
  return found;
}

void no_delay(int fd) {
  const int one = 1;
  check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "cuda_rig: setsockopt");
}

// Whether the move goes on; `move` is left with what remains.
bool advance(Move& move) {
  while (move.bytes > 0) {
    const ssize_t done = move.sends
                             ? send(move.fd, move.data, move.bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                             : recv(move.fd, move.data, move.bytes, MSG_DONTWAIT);
    if (done < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (done <= 0) return false;
    move.data = static_cast<char*>(move.data) + done;
    move.bytes -= static_cast<size_t>(done);
  }
  return true;
}

}  // namespace

bool transfer(std::vector<Move> moves, const std::atomic<bool>& aborted) {
  while (true) {
    // The first of each connection and direction.
    std::map<std::pair<int, bool>, Move*> first;
    for (Move& move : moves) {
      if (move.bytes > 0) first.emplace(std::make_pair(move.fd, move.sends), &move);
    }
    if (first.empty()) return true;
    std::vector<pollfd> waits;
    for (const auto& [key, move] : first) {
      waits.push_back({key.first, static_cast<short>(key.second ? POLLOUT : POLLIN), 0});
    }
    if (aborted) return false;
    check(poll(waits.data(), waits.size(), kLookMs) >= 0 || errno == EINTR, "cuda_rig: poll");
    size_t i = 0;
    for (const auto& [key, move] : first) {
      if (waits[i++].revents != 0 && !advance(*move)) return false;
    }
  }
}

Listener::Listener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  check(fd_ >= 0, "cuda_rig: socket");
  address_.ip = own_ip();
  sockaddr_in at = internet(address_);
  socklen_t size = sizeof at;
  check(bind(fd_, reinterpret_cast<sockaddr*>(&at), size) == 0, "cuda_rig: bind");
  check(listen(fd_, SOMAXCONN) == 0, "cuda_rig: listen");
  check(getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &size) == 0, "cuda_rig: getsockname");
  address_.port = ntohs(at.sin_port);
}

Listener::~Listener() { close(fd_); }

int Listener::accept(const std::atomic<bool>& aborted) const {
  pollfd waits{fd_, POLLIN, 0};
  while (!aborted) {
    if (poll(&waits, 1, kLookMs) <= 0) continue;
    const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    no_delay(fd);
    return fd;
  }
  return -1;
}

int dial(const Listener::Address& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  check(fd >= 0, "cuda_rig: socket");
  const sockaddr_in at = internet(address);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) {
    close(fd);
    return -1;
  }
  no_delay(fd);
  return fd;
}

}  // namespace cuda_rig
