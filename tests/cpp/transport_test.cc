// The sockets half of the transport library, on loopback: this program's own connect() and accept()
// are the library's.
#include "../../csrc/transport/transport.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/transport/crux_transport.h"
#include "../../csrc/transport/route_file.h"
#include "../../csrc/transport/tcp_socket.h"
#include "check.h"

// The library looks at descriptors that other threads may be closing, and recognises by the inode
// when it came too late. Only that look is exempt, against connect() and close(); the long history
// is there so that the stack of an earlier look is still known.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:crux::transport::socket_inode\nrace:crux::transport::borrow\n"
         "race:crux::transport::Descriptor::reset\n";
}
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "history_size=7"; }

namespace {

using crux::transport::Address;
using crux::transport::Descriptor;
using crux::transport::parse_routes;
using crux::transport::Route;
using crux::transport::RouteFile;
using crux::transport::Routes;
using crux::transport::transport;

Address address(const char* text) { return Address::parse(text).value(); }

std::string text(const Address& address) {
  char out[CRUX_ADDRESS_CHARS];
  address.write(out, sizeof out);
  return out;
}

void addresses_of_both_families() {
  CHECK(text(address("10.1.0.2")) == "10.1.0.2");
  CHECK(text(address("2001:db8::7")) == "2001:db8::7");
  CHECK(address("::ffff:10.1.0.2") == address("10.1.0.2"));
  CHECK(address("10.1.0.2").is_v4() && !address("2001:db8::7").is_v4());
  CHECK(address("0.0.0.0").is_any() && address("::").is_any());
  CHECK(!address("0.0.0.1").is_any() && !address("1::").is_any());
  for (const char* bad : {"", "10.1", "10.1.0.256", "host", "10.1.0.2 ", "fe80::1%eth0"}) {
    CHECK(!Address::parse(bad));
  }
}

void the_class_leaves_ecn_alone() {
  for (int ecn = 0; ecn < 4; ++ecn) {
    CHECK(crux::transport::with_dscp(0xFC | ecn, 46) == (46 << 2 | ecn));
  }
}

void routes_by_destination() {
  Routes routes;
  CHECK(routes.to(address("10.1.0.2")) == nullptr);
  Route first, second, again;
  first.destination = again.destination = address("10.1.0.2");
  second.destination = address("2001:db8::7");
  first.dscp = 8;
  again.dscp = 16;
  second.add_hop(3, address("10.3.0.1"));
  second.add_hop(2, address("10.2.0.1"));
  second.add_hop(3, address("10.3.0.2"));
  routes.replace({first, second, again});
  const auto held = routes.to(address("10.1.0.2"));
  CHECK(held->dscp == 16);
  const auto hops = routes.to(address("2001:db8::7"))->hops;
  CHECK(hops.size() == 2 && hops[0].ttl == 2 && hops[1].ttl == 3);
  CHECK(hops[1].accepts(address("10.3.0.2")) && !hops[1].accepts(address("10.2.0.1")));
  routes.replace({});
  CHECK(routes.to(address("10.1.0.2")) == nullptr);
  CHECK(held->dscp == 16);
  routes.skip(29500);
  CHECK(routes.skipped(29500) && !routes.skipped(29501) && !routes.skipped(29499));
}

RouteFile parse(const std::string& text) {
  std::istringstream stream(text);
  return parse_routes(stream);
}

constexpr const char* kGoodRoutes =
    "# two hosts\n"
    "10.1.0.2 via 2:10.100.0.2,10.100.16.2 dscp 40 qp_dscp 26 rate 25000000 ports 49152,49153\n"
    "\n"
    "  2001:db8::7\tvia 2:2001:db8:100::2 via 3:2001:db8:200::2  # over both\n"
    "10.1.0.3\n";

void route_files_are_read() {
  const RouteFile file = parse(kGoodRoutes);
  CHECK(file.error.empty() && file.ignored == 0 && file.routes.size() == 3);
  const Route& first = file.routes[0];
  CHECK(first.destination == address("10.1.0.2") && first.dscp == 40 && first.qp_dscp == 26);
  CHECK(first.rate_Bps == 25000000);
  CHECK(first.udp_ports == (std::vector<uint16_t>{49152, 49153}));
  CHECK(first.hops.size() == 1 && first.hops[0].ttl == 2);
  CHECK(first.hops[0].accepts(address("10.100.16.2")));
  const Route& second = file.routes[1];
  CHECK(second.hops.size() == 2 && second.hops[1].accepts(address("2001:db8:200::2")));
  CHECK(second.dscp == -1 && second.qp_dscp == -1 && second.rate_Bps == 0 &&
        second.udp_ports.empty());
  CHECK(file.routes[2].hops.empty());
}

void a_route_to_anywhere_leaves_loopback_and_listed_destinations() {
  Routes routes;
  routes.replace(parse("* dscp 8 qp_dscp 26 overrides 1\n10.1.0.2 dscp 40\n").routes);
  for (const char* other : {"10.1.0.3", "2001:db8::7", "169.254.0.1", "::2"}) {
    const Routes::Held found = routes.to(address(other));
    CHECK(found && found->dscp == 8 && found->qp_dscp == 26 && found->overrides);
  }
  CHECK(routes.to(address("10.1.0.2"))->dscp == 40);
  for (const char* own : {"127.0.0.1", "127.8.0.1", "::1"}) CHECK(!routes.to(address(own)));
  routes.replace(parse("127.0.0.1 dscp 8\n").routes);
  CHECK(routes.to(address("127.0.0.1")) && !routes.to(address("10.1.0.3")));
}

void malformed_lines_are_told_and_ignored() {
  const std::vector<std::string> bad = {
      "host via 2:10.0.0.1",
      "10.1.0.2 via",
      "10.1.0.2 via 2",
      "10.1.0.2 via 2:",
      "10.1.0.2 via 0:10.0.0.1",
      "10.1.0.2 via 256:10.0.0.1",
      "10.1.0.2 via 2:10.0.0.1,x",
      "10.1.0.2 dscp 64",
      "10.1.0.2 dscp -1",
      "10.1.0.2 dscp 4x",
      "10.1.0.2 qp_dscp 64",
      "10.1.0.2 rate 0",
      "10.1.0.2 rate 99999999999999999999",
      "10.1.0.2 ports 0",
      "10.1.0.2 ports 65536",
      "10.1.0.2 colour red",
      "0.0.0.0 dscp 8",
      "10.1.0.2 dscp 8 rate",
      "10.1.0.2 overrides 2",
      "* via 2:10.0.0.1",
      "* dscp 8 ports 50001",
  };
  for (const std::string& line : bad) {
    const RouteFile file = parse("10.9.9.9\n" + line + "\n10.8.8.8 dscp 8\n");
    CHECK(file.ignored == 1 && file.routes.size() == 2);
    CHECK(file.error.rfind("line 2: ", 0) == 0);
  }
}

// Whatever is in a file, what is taken from it is usable.
void mutated_route_files_do_no_harm() {
  std::mt19937 random(20241104);
  const auto below = [&](size_t n) { return random() % n; };
  const std::string alphabet = "0123456789.:, \t\nviadscprteo#x-\0\xff";
  size_t read = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = kGoodRoutes;
    for (size_t edits = 1 + below(6); edits > 0; --edits) {
      const size_t at = below(text.size());
      switch (below(4)) {
        case 0:
          text[at] = alphabet[below(alphabet.size())];
          break;
        case 1:
          text.erase(at, 1 + below(8));
          break;
        case 2:
          text.insert(at, 1, alphabet[below(alphabet.size())]);
          break;
        default:
          text.insert(at, text.substr(below(text.size()), below(40)));
      }
      if (text.empty()) text = " ";
    }
    const RouteFile file = parse(text);
    const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
    CHECK(file.routes.size() + file.ignored <= lines);
    CHECK(file.error.empty() == (file.ignored == 0));
    for (const Route& route : file.routes) {
      CHECK(!route.destination.is_any() && route.dscp >= -1 && route.dscp < 64);
      for (size_t i = 0; i < route.hops.size(); ++i) {
        CHECK(route.hops[i].ttl >= 1 && route.hops[i].ttl <= 255);
        CHECK(!route.hops[i].addresses.empty());
        CHECK(i == 0 || route.hops[i - 1].ttl < route.hops[i].ttl);
      }
    }
    read += file.routes.size();
  }
  CHECK(read > 20000);
}

crux_route route_to(const char* destination) {
  crux_route route{};
  std::strcpy(route.destination, destination);
  route.dscp = -1;
  return route;
}

void add_hop(crux_route& route, int ttl, const char* address) {
  crux_hop& hop = route.hops[route.hop_count++];
  hop.ttl = ttl;
  std::strcpy(hop.address, address);
}

void routes_that_cannot_be_used_change_nothing() {
  crux_route good = route_to("127.0.0.9"), bad = route_to("127.0.0.8");
  good.dscp = 8;
  CHECK(crux_transport_set_routes(&good, 1) == 0);
  const auto refused = [&] { return crux_transport_set_routes(&bad, 1) == EINVAL; };
  bad.dscp = 64;
  CHECK(refused());
  bad = route_to("nowhere");
  CHECK(refused());
  bad = route_to("127.0.0.8");
  bad.hop_count = CRUX_ROUTE_HOPS + 1;
  CHECK(refused());
  bad = route_to("127.0.0.8");
  add_hop(bad, 0, "10.0.0.1");
  CHECK(refused());
  bad = route_to("127.0.0.8");
  bad.port_count = CRUX_ROUTE_PORTS + 1;
  CHECK(refused());
  bad = route_to("127.0.0.8");
  std::memset(bad.destination, '1', sizeof bad.destination);
  CHECK(refused());
  CHECK(transport()->routes.to(address("127.0.0.9"))->dscp == 8);
  CHECK(crux_transport_set_port_range(1023, 2000) == EINVAL);
  CHECK(crux_transport_set_port_range(3000, 2000) == EINVAL);
  CHECK(crux_transport_set_routes(nullptr, 0) == 0);
  CHECK(transport()->routes.to(address("127.0.0.9")) == nullptr);
}

// A listening socket and its address.
class Listener {
 public:
  explicit Listener(const char* host = "127.0.0.1") : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    address_.sin_family = AF_INET;
    CHECK(::inet_pton(AF_INET, host, &address_.sin_addr) == 1);
    socklen_t size = sizeof address_;
    CHECK(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address_), size) == 0);
    CHECK(::listen(fd_.get(), 128) == 0);
    CHECK(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address_), &size) == 0);
  }

  int fd() const { return fd_.get(); }
  uint16_t port() const { return ntohs(address_.sin_port); }
  int try_connect(int fd) const {
    return ::connect(fd, reinterpret_cast<const sockaddr*>(&address_), sizeof address_);
  }
  Descriptor connected(int flags = 0) const {
    Descriptor made(::socket(AF_INET, SOCK_STREAM | flags, 0));
    CHECK(try_connect(made.get()) == 0);
    return made;
  }
  Descriptor accepted() const {
    Descriptor made(::accept(fd_.get(), nullptr, nullptr));
    CHECK(made);
    return made;
  }

 private:
  Descriptor fd_;
  sockaddr_in address_{};
};

uint64_t inode(int fd) { return crux::transport::socket_inode(fd).value(); }

std::vector<crux_connection> connections() {
  std::vector<crux_connection> out(1024);
  const size_t count = crux_transport_connections(out.data(), out.size());
  CHECK(count <= out.size());
  out.resize(count);
  return out;
}

std::optional<crux_connection> listed(uint64_t id) {
  for (const crux_connection& c : connections()) {
    if (c.id == id) return c;
  }
  return std::nullopt;
}

uint16_t local_port(int fd) { return crux::transport::local_endpoint(fd).value().port; }

int option(int fd, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  CHECK(::getsockopt(fd, level, name, &value, &size) == 0);
  return value;
}

void a_moved_connection_is_found_again() {
  const Listener listener;
  Descriptor first = listener.connected();
  const uint64_t id = inode(first.get());
  const Descriptor moved(::fcntl(first.get(), F_DUPFD_CLOEXEC, 200));
  first.reset();
  CHECK(listed(id)->fd == moved.get());
  CHECK(listed(id)->fd == moved.get());
}

// While this exists, this program's connections are steered like those of a collective library;
// there is a route at most as long.
struct Steered {
  Steered() { transport()->steer_all = true; }
  explicit Steered(const crux_route& route) : Steered() {
    CHECK(crux_transport_set_routes(&route, 1) == 0);
  }
  ~Steered() {
    transport()->steer_all = false;
    CHECK(crux_transport_set_routes(nullptr, 0) == 0);
  }
};

void others_connections_are_left_alone() {
  crux_route route = route_to("127.0.0.1");
  route.dscp = 40;
  CHECK(crux_transport_set_routes(&route, 1) == 0);
  const Listener listener, store;
  const uint16_t skipped = store.port();
  CHECK(crux_transport_skip_ports(&skipped, 1) == 0);
  // This program is no collective library.
  const Descriptor plain = listener.connected();
  CHECK(listed(inode(plain.get()))->how == CRUX_UNTOUCHED);
  const Steered steered;
  const Descriptor ours = listener.connected(), rendezvous = store.connected();
  CHECK(listed(inode(ours.get()))->how == CRUX_AT_CONNECT);
  CHECK(listed(inode(ours.get()))->dscp == 40);
  CHECK(listed(inode(rendezvous.get()))->how == CRUX_UNTOUCHED);
  CHECK(option(rendezvous.get(), IPPROTO_IP, IP_TOS) == 0);
}

void options_are_set_before_the_first_packet_and_taken_back() {
  crux_route route = route_to("127.0.0.1");
  route.dscp = 46;
  route.rate_Bps = 3000000;
  const Steered steered(route);
  const Listener listener;
  const Descriptor client = listener.connected();
  const uint64_t id = inode(client.get());
  CHECK(listed(id)->dscp == 46 && listed(id)->rate_Bps == 3000000);
  crux_socket_setting setting;
  CHECK(crux_transport_set_socket(client.get(), id, 8, 0, &setting) == 0);
  CHECK(setting.original_tos == 0 && setting.original_rate_Bps == 0);
  CHECK(setting.before_tos == 46 << 2 && setting.before_rate_Bps == 3000000);
  CHECK(setting.after_tos == 8 << 2 && setting.after_rate_Bps == 0);
  CHECK(listed(id)->how == CRUX_LIVE_OPTION);
  CHECK(crux_transport_set_socket(client.get(), id, -1, UINT64_MAX, &setting) == 0);
  CHECK(setting.before_tos == 8 << 2 && setting.after_tos == 8 << 2);
  CHECK(crux_transport_set_socket(client.get(), id, 64, UINT64_MAX, nullptr) == EINVAL);
  CHECK(crux_transport_set_socket(-1, id, 8, UINT64_MAX, nullptr) == ENOENT);
}

void blocking_mode_and_other_sockets_stay_as_they_are() {
  const Listener listener;
  const Descriptor client = listener.connected();
  const int flags = ::fcntl(client.get(), F_GETFL);
  CHECK(crux_transport_set_socket(client.get(), inode(client.get()), 8, 1000000, nullptr) == 0);
  CHECK(::fcntl(client.get(), F_GETFL) == flags);
  const Descriptor udp(::socket(AF_INET, SOCK_DGRAM, 0));
  CHECK(crux_transport_set_socket(udp.get(), inode(udp.get()), 8, 0, nullptr) == ENOPROTOOPT);
  CHECK(listener.try_connect(udp.get()) == 0);
  CHECK(!listed(inode(udp.get())));
  const Descriptor local(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un nowhere{};
  nowhere.sun_family = AF_UNIX;
  std::strcpy(nowhere.sun_path, "/nonexistent/socket");
  CHECK(::connect(local.get(), reinterpret_cast<sockaddr*>(&nowhere), sizeof nowhere) == -1);
  CHECK(errno == ENOENT);
  CHECK(::connect(-1, nullptr, 0) == -1 && errno == EBADF);
}

void results_and_errno_come_through() {
  uint16_t closed;
  {
    const Listener gone;
    closed = gone.port();
  }
  sockaddr_in nobody{};
  nobody.sin_family = AF_INET;
  nobody.sin_port = htons(closed);
  nobody.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const Descriptor refused(::socket(AF_INET, SOCK_STREAM, 0));
  CHECK(::connect(refused.get(), reinterpret_cast<sockaddr*>(&nobody), sizeof nobody) == -1);
  CHECK(errno == ECONNREFUSED);
  CHECK(!listed(inode(refused.get())));
  // What was set for the first try still counts for the next.
  crux_route route = route_to("127.0.0.1");
  route.dscp = 40;
  CHECK(crux_transport_set_routes(&route, 1) == 0);
  const Descriptor patient(::socket(AF_INET, SOCK_STREAM, 0));
  {
    const Steered steered;
    CHECK(::connect(patient.get(), reinterpret_cast<sockaddr*>(&nobody), sizeof nobody) == -1);
    CHECK(errno == ECONNREFUSED && !listed(inode(patient.get())));
  }
  CHECK(crux_transport_set_routes(nullptr, 0) == 0);
  const Listener listener;
  CHECK(listener.try_connect(patient.get()) == 0);
  CHECK(listed(inode(patient.get()))->how == CRUX_AT_CONNECT);
  CHECK(listed(inode(patient.get()))->peer_port == listener.port());
  errno = EILSEQ;
  const Descriptor client = listener.connected();
  const Descriptor server = listener.accepted();
  CHECK(errno == EILSEQ);
}

// A path whose hops nobody can be: the search ends in time, and the connection is made all the
// same.
crux_route unknown_path() {
  crux_route route = route_to("127.0.0.1");
  route.dscp = 24;
  add_hop(route, 1, "192.0.2.1");
  return route;
}

void a_path_that_is_not_found_does_not_keep_a_connection_from_being_made() {
  transport()->limits.time = std::chrono::milliseconds(40);
  const crux_route route = unknown_path();
  const Steered steered(route);
  const Listener listener;
  const Descriptor client = listener.connected();
  const auto mine = listed(inode(client.get()));
  CHECK(mine->how == CRUX_REFUSED && mine->probes > 0 && mine->dscp == 24);
  // On loopback a SYN reaches its destination whatever its TTL. It is dropped there where the
  // kernel knows signed SYNs, and answered where it does not.
  CHECK(mine->error == ETIMEDOUT || mine->error == ERANGE);
  const Descriptor server = listener.accepted();
  pollfd more{listener.fd(), POLLIN, 0};
  CHECK(mine->error == ERANGE || ::poll(&more, 1, 0) == 0);

  // The same search again would be as vain.
  const Descriptor next = listener.connected();
  const auto second = listed(inode(next.get()));
  CHECK(second->how == CRUX_REFUSED && second->error == mine->error && second->probes == 0);

  CHECK(crux_transport_set_routes(&route, 1) == 0);
  Descriptor nonblocking(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
  CHECK(listener.try_connect(nonblocking.get()) == -1 && errno == EINPROGRESS);
  CHECK((::fcntl(nonblocking.get(), F_GETFL) & O_NONBLOCK) != 0);
  pollfd done{nonblocking.get(), POLLOUT, 0};
  CHECK(::poll(&done, 1, 5000) == 1);
  const uint32_t probes = listed(inode(nonblocking.get()))->probes;
  CHECK(probes > 0);
  // Asking again is no new attempt.
  CHECK(listener.try_connect(nonblocking.get()) == 0);
  CHECK(listed(inode(nonblocking.get()))->probes == probes);
}

void what_the_program_has_bound_stays_bound() {
  const Steered steered(unknown_path());
  const Listener listener;
  Descriptor client(::socket(AF_INET, SOCK_STREAM, 0));
  const int on = 1;
  CHECK(::setsockopt(client.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  CHECK(::bind(client.get(), reinterpret_cast<sockaddr*>(&any), sizeof any) == 0);
  const uint16_t port = local_port(client.get());
  CHECK(listener.try_connect(client.get()) == 0);
  CHECK(local_port(client.get()) == port);
  const auto mine = listed(inode(client.get()));
  CHECK(mine->how == CRUX_REFUSED && mine->error == EINVAL && mine->probes == 0);
  CHECK(option(client.get(), SOL_SOCKET, SO_REUSEADDR) == 1);
}

void sharing_options_are_put_back() {
  const Steered steered(unknown_path());
  const Listener listener;
  const Descriptor client(::socket(AF_INET, SOCK_STREAM, 0));
  const int on = 1;
  CHECK(::setsockopt(client.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
  CHECK(::setsockopt(client.get(), SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) == 0);
  CHECK(listener.try_connect(client.get()) == 0);
  CHECK(listed(inode(client.get()))->probes > 0);
  CHECK(option(client.get(), SOL_SOCKET, SO_REUSEADDR) == 1);
  CHECK(option(client.get(), SOL_SOCKET, SO_REUSEPORT) == 1);
}

void no_free_port_is_told() {
  const Steered steered(unknown_path());
  const Listener listener, taken;
  CHECK(crux_transport_set_port_range(taken.port(), taken.port()) == 0);
  const Descriptor client = listener.connected();
  const auto mine = listed(inode(client.get()));
  CHECK(mine->how == CRUX_REFUSED && mine->error == EADDRINUSE && mine->probes == 0);
  CHECK(crux_transport_set_port_range(20000, 28999) == 0);
}

const Listener* in_handler = nullptr;

void connect_in_handler(int) {
  const int before = errno;
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  in_handler->try_connect(fd);
  ::close(fd);
  errno = before;
}

// connect() is on POSIX' list of what a signal handler may call.
void a_signal_handler_may_connect_at_any_moment() {
  const Listener listener, other;
  in_handler = &other;
  struct sigaction action{};
  action.sa_handler = connect_in_handler;
  action.sa_flags = SA_RESTART;
  CHECK(::sigaction(SIGALRM, &action, nullptr) == 0);
  const itimerval often{{0, 200}, {0, 200}}, never{};
  CHECK(::setitimer(ITIMER_REAL, &often, nullptr) == 0);
  for (int i = 0; i < 300; ++i) {
    const Descriptor client(::socket(AF_INET, SOCK_STREAM, 0));
    const int result = listener.try_connect(client.get());
    CHECK(result == 0 || errno == EINTR);
    CHECK(listed(inode(client.get())));
    CHECK(crux_transport_set_socket(client.get(), inode(client.get()), 8, 0, nullptr) == 0 ||
          result != 0);
    pollfd waiting{listener.fd(), POLLIN, 0};
    while (::poll(&waiting, 1, 0) == 1) Descriptor(::accept(listener.fd(), nullptr, nullptr));
    waiting.fd = other.fd();
    while (::poll(&waiting, 1, 0) == 1) Descriptor(::accept(other.fd(), nullptr, nullptr));
  }
  CHECK(::setitimer(ITIMER_REAL, &never, nullptr) == 0);
}

void many_threads_at_once() {
  const Steered steered;
  const Listener listener;
  crux_route route = route_to("127.0.0.1");
  route.dscp = 8;
  std::atomic<bool> stop{false};
  std::thread server([&] {
    std::vector<Descriptor> held;
    while (!stop) {
      pollfd ready{listener.fd(), POLLIN, 0};
      if (::poll(&ready, 1, 20) == 1) held.push_back(listener.accepted());
      if (held.size() > 64) held.clear();
    }
  });
  std::thread watcher([&] {
    while (!stop) connections();
  });
  std::thread planner([&] {
    while (!stop) {
      CHECK(crux_transport_set_routes(&route, 1) == 0);
      CHECK(crux_transport_set_routes(nullptr, 0) == 0);
    }
  });
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&] {
      for (int n = 0; n < 100; ++n) {
        const Descriptor client = listener.connected();
        const uint64_t id = inode(client.get());
        CHECK(crux_transport_set_socket(client.get(), id, 16, UINT64_MAX, nullptr) == 0);
        CHECK(listed(id)->dscp == 16);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  stop = true;
  server.join();
  watcher.join();
  planner.join();
}

}  // namespace

int main() {
  CHECK(transport() != nullptr && transport()->enabled);
  CHECK(crux_transport_abi() == CRUX_TRANSPORT_ABI);
  CHECK(crux_transport_sees_sockets());
  addresses_of_both_families();
  the_class_leaves_ecn_alone();
  routes_by_destination();
  route_files_are_read();
  a_route_to_anywhere_leaves_loopback_and_listed_destinations();
  malformed_lines_are_told_and_ignored();
  mutated_route_files_do_no_harm();
  routes_that_cannot_be_used_change_nothing();
  a_moved_connection_is_found_again();
  others_connections_are_left_alone();
  options_are_set_before_the_first_packet_and_taken_back();
  blocking_mode_and_other_sockets_stay_as_they_are();
  results_and_errno_come_through();
  a_path_that_is_not_found_does_not_keep_a_connection_from_being_made();
  what_the_program_has_bound_stays_bound();
  sharing_options_are_put_back();
  no_free_port_is_told();
  a_signal_handler_may_connect_at_any_moment();
  many_threads_at_once();
  return 0;
}
