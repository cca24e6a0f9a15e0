// The current plan's routes for the connections of this process, by destination.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "address.h"
#include "wiped.h"

namespace crux::transport {

// A TTL at which the path is checked, and the addresses that may answer there.
struct Hop {
  int ttl = 0;
  std::vector<Address> addresses;

  bool accepts(const Address& address) const {
    return std::find(addresses.begin(), addresses.end(), address) != addresses.end();
  }
};

namespace internal {

inline constexpr std::chrono::seconds kVainFor{10};

inline int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::nanoseconds(now).count();
}

}  // namespace internal

// Remembers for a while that the search for a path failed. The copies of one route share it, so
// that connections that are made meanwhile need not search again.
class NegativeCache {
 public:
  // The error of a search that failed a short time ago, or 0.
  int error() const { return internal::now_ns() < until_ns_.load() ? error_.load() : 0; }
  void remember(int error) {
    error_.store(error);
    until_ns_.store(internal::now_ns() + std::chrono::nanoseconds(internal::kVainFor).count());
  }

 private:
  std::atomic<int64_t> until_ns_{0};
  std::atomic<int> error_{0};
};

struct Route {
  Address destination;     // any address: every other one but loopback
  int dscp = -1;           // of sockets, 0 to 63; -1: leave as it is
  int qp_dscp = -1;        // of queue pairs that asked for DSCP 0; -1: leave as it is
  bool overrides = false;  // qp_dscp is for all queue pairs
  uint64_t rate_Bps = 0;   // 0: no limit
  std::vector<Hop> hops;   // ascending TTL, each at most once
  std::vector<uint16_t> udp_ports;
  std::shared_ptr<NegativeCache> failures = std::make_shared<NegativeCache>();

  // Adds one address that may answer at `ttl`.
  void add_hop(int ttl, const Address& address) {
    const auto at = std::lower_bound(hops.begin(), hops.end(), ttl,
                                     [](const Hop& hop, int wanted) { return hop.ttl < wanted; });
    if (at != hops.end() && at->ttl == ttl) {
      at->addresses.push_back(address);
    } else {
      hops.insert(at, Hop{ttl, {address}});
    }
  }
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
  ~Routes() { free(table_.load()); }

  // If two routes have the same destination, the later one counts.
  void replace(std::vector<Route> routes) {
    auto made = std::make_unique<Table>();
    for (Route& route : routes) {
      const Address destination = route.destination;
      made->routes.insert_or_assign(destination, std::move(route));
    }
    Table* unread = nullptr;
    {
      const std::lock_guard hold(users_->writers);
      Table* const next = made.release();
      next->older = table_.load();
      table_.store(next);
      // Who begins to read from now on reads the new table.
      if (users_->readers.load() == 0) unread = std::exchange(next->older, nullptr);
    }
    free(unread);
  }
  // The route to `destination`, or null. It stays valid after replace(), while it is held.
  Held to(const Address& destination) const {
    users_->readers.fetch_add(1);
    if (const Table* const table = table_.load()) {
      auto found = table->routes.find(destination);
      if (found == table->routes.end() && !destination.is_loopback()) {
        found = table->routes.find(Address{});
      }
      if (found != table->routes.end()) return Held(&found->second, Release{&users_->readers});
    }
    users_->readers.fetch_sub(1);
    return Held(nullptr, Release{nullptr});
  }

  void set_ports(PortRange ports) { ports_.store(ports, std::memory_order_relaxed); }
  PortRange ports() const { return ports_.load(std::memory_order_relaxed); }
  // `port` is a rendezvous store's.
  void skip(uint16_t port) {
    skipped_[port / 64].fetch_or(uint64_t{1} << port % 64, std::memory_order_relaxed);
  }
  bool skipped(uint16_t port) const {
    return skipped_[port / 64].load(std::memory_order_relaxed) >> port % 64 & 1;
  }

 private:
  struct Table {
    std::map<Address, Route> routes;
    Table* older;  // replaced, but somebody may read it
  };
  struct Users {
    std::atomic<uint32_t> readers{0};
    std::mutex writers;
  };

  static void free(Table* table) {
    while (table != nullptr) delete std::exchange(table, table->older);
  }

  Wiped<Users> users_;
  std::atomic<Table*> table_{nullptr};
  std::atomic<PortRange> ports_{PortRange{}};
  std::array<std::atomic<uint64_t>, 1024> skipped_{};  // a bit for each port
};

}  // namespace crux::transport
