#include "path_probe.h"

#include <linux/errqueue.h>
#include <netinet/icmp6.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <vector>

#include "real_calls.h"
#include "tcp_socket.h"

namespace crux::transport {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kAttempts = 3;               // of one port at one TTL
constexpr milliseconds kAnswerTime{15};    // for which a burst waits for its answers
constexpr milliseconds kLongestPause{40};  // between bursts that went unanswered

template <class T>
bool set_option(int fd, int level, int option, const T& value) {
  return ::setsockopt(fd, level, option, &value, sizeof value) == 0;
}

// A SYN that should get past the last hop must not become a connection: a Linux host drops one that
// bears an MD5 signature (RFC 2385) for which it has no key. Best effort.
void sign(int fd, const SocketAddress& peer) {
  tcp_md5sig signature{};
  std::memcpy(&signature.tcpm_addr, peer.get(), peer.size());
  signature.tcpm_keylen = 4;
  std::memcpy(signature.tcpm_key, "crux", 4);
  set_option(fd, IPPROTO_TCP, TCP_MD5SIG, signature);
}

enum class Answer { kNone, kHop, kReached, kFailed };

// One SYN under way from `port`.
struct Probe {
  Descriptor socket;
  uint16_t port = 0;
  size_t hop = 0;  // index into the route's hops
  int attempts = 0;
  Answer answer = Answer::kNone;
  int error = 0;
  Address from;
};

int open_socket(const ProbedConnection& connection, int ttl, const SocketAddress& peer,
                Descriptor& out) {
  const bool ipv6 = !connection.peer.address.is_v4();
  const int family = ipv6 ? AF_INET6 : AF_INET;
  Descriptor made(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
  if (!made) return errno;
  const int fd = made.get(), on = 1, off = 0;
  const int level = ipv6 ? int{IPPROTO_IPV6} : int{IPPROTO_IP};
  if (!set_option(fd, level, ipv6 ? IPV6_UNICAST_HOPS : IP_TTL, ttl) ||
      !set_option(fd, level, ipv6 ? IPV6_RECVERR : IP_RECVERR, on)) {
    return errno;
  }
  set_option(fd, level, ipv6 ? IPV6_TCLASS : IP_TOS, connection.tos);
  if (ipv6) set_option(fd, level, IPV6_AUTOFLOWLABEL, off);
  if (connection.device != 0) set_option(fd, SOL_SOCKET, SO_BINDTOIFINDEX, connection.device);
  sign(fd, peer);
  out = std::move(made);
  return 0;
}

// Sends the SYN. 0, EADDRINUSE where the port is taken, or the errno of what failed.
int send_probe(const ProbedConnection& connection, int ttl, Probe& probe) {
  const int family = connection.peer.address.is_v4() ? AF_INET : AF_INET6;
  const SocketAddress peer(connection.peer, family);
  if (const int error = open_socket(connection, ttl, peer, probe.socket)) return error;
  Endpoint from = connection.local;
  from.port = probe.port;
  const SocketAddress local(from, family);
  probe.answer = Answer::kNone;
  if (::bind(probe.socket.get(), local.get(), local.size()) != 0) return errno;
  if (real_calls().connect(probe.socket.get(), peer.get(), peer.size()) == 0) {
    probe.answer = Answer::kReached;
    return 0;
  }
  if (errno == EINPROGRESS) return 0;
  if (errno == ECONNREFUSED) {
    probe.answer = Answer::kReached;
    return 0;
  }
  return errno == EADDRNOTAVAIL ? EADDRINUSE : errno;
}

// The router that reported a SYN's death, where the error queue holds such a report.
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
    const auto* offender = reinterpret_cast<const sockaddr*>(CMSG_DATA(c) + sizeof error);
    const socklen_t size = v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (const auto end = Endpoint::from(offender, size)) return end->address;
  }
  return std::nullopt;
}

void read_answer(Probe& probe) {
  if (const auto from = expired_at(probe.socket.get())) {
    probe.answer = Answer::kHop;
    probe.from = *from;
    return;
  }
  socklen_t size = sizeof probe.error;
  ::getsockopt(probe.socket.get(), SOL_SOCKET, SO_ERROR, &probe.error, &size);
  const bool reached = probe.error == 0 || probe.error == ECONNREFUSED;
  probe.answer = reached ? Answer::kReached : Answer::kFailed;
}

int until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::max<milliseconds::rep>(0, left.count()));
}

// Reads answers until all have come, `enough` says so of one, or the deadline has passed.
template <class Enough>
void collect(std::vector<Probe>& burst, Clock::time_point deadline, const Enough& enough) {
  std::vector<pollfd> waiting;
  while (true) {
    waiting.clear();
    for (const Probe& probe : burst) {
      const bool open = probe.answer == Answer::kNone;
      waiting.push_back({open ? probe.socket.get() : -1, POLLIN | POLLOUT, 0});
    }
    const auto pending = [](const pollfd& entry) { return entry.fd >= 0; };
    if (std::none_of(waiting.begin(), waiting.end(), pending)) return;
    const int ready = ::poll(waiting.data(), waiting.size(), until(deadline));
    if (ready < 0 && errno != EINTR) return;
    bool done = false;
    for (size_t i = 0; ready > 0 && i < burst.size(); ++i) {
      if (waiting[i].fd < 0 || waiting[i].revents == 0) continue;
      read_answer(burst[i]);
      done = done || enough(burst[i]);
    }
    if (done || Clock::now() >= deadline) return;
  }
}

// Hands out the ports of a range once each.
class Candidates {
 public:
  Candidates(const Routes& routes, uint16_t start) : routes_(routes), range_(routes.ports()) {
    left_ = range_.last - range_.first + 1;
    next_ = range_.first + start % left_;
  }

  uint16_t take() {
    while (left_ > 0) {
      --left_;
      const auto port = static_cast<uint16_t>(next_);
      next_ = next_ == range_.last ? range_.first : next_ + 1;
      if (!routes_.skipped(port)) return port;
    }
    return 0;
  }

 private:
  const Routes& routes_;
  PortRange range_;
  uint32_t left_, next_;
};

}  // namespace

PathFound find_port(const ProbedConnection& connection, const Route& route, const Routes& ports,
                    uint16_t start, const ProbeLimits& limits,
                    const std::function<bool(uint16_t)>& claim) {
  const Clock::time_point end = Clock::now() + limits.time;
  const auto matches = [&](const Probe& probe) {
    return probe.answer == Answer::kHop && route.hops[probe.hop].accepts(probe.from);
  };
  const auto arrived = [&](const Probe& probe) {
    return matches(probe) && probe.hop + 1 == route.hops.size();
  };
  Candidates candidates(ports, start);
  PathFound found;
  std::vector<Probe> burst, kept;
  size_t width = limits.burst;
  milliseconds pause{1};
  bool answered = false, sent_any = false;

  while (Clock::now() < end && found.probes < limits.probes) {
    burst.clear();
    // Ports that have answered at an earlier hop, or not at all yet, go before new ones.
    while (burst.size() < width && !kept.empty()) {
      burst.push_back(std::move(kept.back()));
      kept.pop_back();
    }
    for (uint16_t port; burst.size() < width && (port = candidates.take()) != 0;) {
      burst.emplace_back().port = port;
    }
    if (burst.empty()) break;

    for (Probe& probe : burst) {
      probe.error = send_probe(connection, route.hops[probe.hop].ttl, probe);
      if (probe.error != 0) {
        probe.answer = Answer::kFailed;
        if (probe.error != EADDRINUSE && probe.error != EACCES) found.error = probe.error;
        continue;
      }
      ++probe.attempts;
      ++found.probes;
      sent_any = true;
    }
    if (found.error != 0) return found;
    collect(burst, std::min(end, Clock::now() + kAnswerTime), arrived);

    size_t silent = 0;
    for (Probe& probe : burst) {
      probe.socket.reset();
      if (probe.answer == Answer::kReached) {
        found.error = ERANGE;
        return found;
      }
      if (probe.answer == Answer::kHop) {
        answered = true;
        found.via_ttl = route.hops[probe.hop].ttl;
        found.via = probe.from;
        if (arrived(probe)) {
          if (claim(probe.port)) {
            found.port = probe.port;
            return found;
          }
        } else if (matches(probe)) {
          ++probe.hop;
          probe.attempts = 0;
          kept.push_back(std::move(probe));
        }
      } else if (probe.answer == Answer::kNone) {
        ++silent;
        if (probe.attempts < kAttempts) kept.push_back(std::move(probe));
      }
    }
    if (2 * silent > burst.size()) {
      width = std::max<size_t>(1, width / 2);
      ::poll(nullptr, 0, std::min(until(end), static_cast<int>(pause.count())));
      pause = std::min(2 * pause, kLongestPause);
    } else {
      width = std::min<size_t>(limits.burst, 2 * width);
      pause = milliseconds{1};
    }
  }
  found.error = answered ? EHOSTUNREACH : sent_any ? ETIMEDOUT : EADDRINUSE;
  return found;
}

}  // namespace crux::transport
