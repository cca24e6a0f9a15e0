// What the plan in force wants of this process's connections, by destination.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "address.h"

namespace crux::transport {

// One TTL at which the path is to be checked, and who may answer there.
struct Hop {
  int ttl = 0;
  std::vector<Address> addresses;

  bool accepts(const Address& address) const;
};

// The last search for a path that was in vain, shared by the copies of one route. Whoever connects
// to many ports of one host does not wait for the same search each time.
class VainSearch {
 public:
  // Of a search that failed a short while ago; 0 where there was none.
  int error() const;
  void remember(int error);

 private:
  std::atomic<int64_t> until_ns_{0};
  std::atomic<int> error_{0};
};

struct Route {
  Address destination;
  int dscp = -1;          // 0 to 63; -1: leave as it is
  uint64_t rate_Bps = 0;  // 0: no limit
  std::vector<Hop> hops;  // ascending TTL, each at most once
  std::vector<uint16_t> udp_ports;
  std::shared_ptr<VainSearch> vain = std::make_shared<VainSearch>();

  // Adds one address that may answer at `ttl`.
  void add_hop(int ttl, const Address& address);
};

// Inclusive.
struct PortRange {
  uint16_t first = 20000;
  uint16_t last = 28999;
};

class Routes {
 public:
  // Of two routes to one destination the later counts.
  void replace(std::vector<Route> routes);
  // The route to `destination`, null where there is none; it outlives its replacement.
  std::shared_ptr<const Route> to(const Address& destination) const;

  void set_ports(PortRange ports);
  PortRange ports() const;
  // `port` is a rendezvous store's.
  void skip(uint16_t port);
  bool skipped(uint16_t port) const;

  // Around fork().
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  using Table = std::map<Address, Route>;

  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_;
  std::atomic<PortRange> ports_{PortRange{}};
  std::array<std::atomic<uint64_t>, 1024> skipped_{};  // a bit for each port
};

}  // namespace crux::transport
