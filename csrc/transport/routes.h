// The current plan's routes for the connections of this process, by destination.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "address.h"
#include "wiped.h"

namespace crux::transport {

// A TTL at which the path is checked, and the addresses that may answer there.
struct Hop {
  int ttl = 0;
  std::vector<Address> addresses;

  bool accepts(const Address& address) const;
};

// Remembers for a while that the search for a path failed. The copies of one route share it, so
// that connections that are made meanwhile need not search again.
class NegativeCache {
 public:
  // The error of a search that failed a short time ago, or 0.
  int error() const;
  void remember(int error);

 private:
  std::atomic<int64_t> until_ns_{0};
  std::atomic<int> error_{0};
};

struct Route {
  Address destination;
  int dscp = -1;           // of sockets, 0 to 63; -1: leave as it is
  int qp_dscp = -1;        // of queue pairs that asked for DSCP 0; -1: leave as it is
  bool overrides = false;  // qp_dscp is for all queue pairs
  uint64_t rate_Bps = 0;   // 0: no limit
  std::vector<Hop> hops;   // ascending TTL, each at most once
  std::vector<uint16_t> udp_ports;
  std::shared_ptr<NegativeCache> failures = std::make_shared<NegativeCache>();

  // Adds one address that may answer at `ttl`.
  void add_hop(int ttl, const Address& address);
};

// Inclusive.
struct PortRange {
  uint16_t first = 20000;
  uint16_t last = 28999;
};

// Reading them takes no lock and frees no memory, because connect() may be called in a signal
// handler, and in the child of a fork.
class Routes {
  struct Release {
    std::atomic<uint32_t>* readers;
    void operator()(const Route*) const { readers->fetch_sub(1); }
  };

 public:
  using Held = std::unique_ptr<const Route, Release>;

  Routes() = default;
  ~Routes();

  // If two routes have the same destination, the later one counts.
  void replace(std::vector<Route> routes);
  // The route to `destination`, or null. It stays valid after replace(), while it is held.
  Held to(const Address& destination) const;

  void set_ports(PortRange ports);
  PortRange ports() const;
  // `port` is a rendezvous store's.
  void skip(uint16_t port);
  bool skipped(uint16_t port) const;

 private:
  struct Table {
    std::map<Address, Route> routes;
    Table* older;  // replaced, but somebody may read it
  };
  struct Users {
    std::atomic<uint32_t> readers{0};
    std::mutex writers;
  };

  static void free(Table* table);

  Wiped<Users> users_;
  std::atomic<Table*> table_{nullptr};
  std::atomic<PortRange> ports_{PortRange{}};
  std::array<std::atomic<uint64_t>, 1024> skipped_{};  // a bit for each port
};

}  // namespace crux::transport
