#include "routes.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace crux::transport {
namespace {

constexpr std::chrono::seconds kVainFor{10};

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::nanoseconds(now).count();
}

}  // namespace

int NegativeCache::error() const { return now_ns() < until_ns_.load() ? error_.load() : 0; }

void NegativeCache::remember(int error) {
  error_.store(error);
  until_ns_.store(now_ns() + std::chrono::nanoseconds(kVainFor).count());
}

bool Hop::accepts(const Address& address) const {
  return std::find(addresses.begin(), addresses.end(), address) != addresses.end();
}

void Route::add_hop(int ttl, const Address& address) {
  const auto at = std::lower_bound(hops.begin(), hops.end(), ttl,
                                   [](const Hop& hop, int wanted) { return hop.ttl < wanted; });
  if (at != hops.end() && at->ttl == ttl) {
    at->addresses.push_back(address);
  } else {
    hops.insert(at, Hop{ttl, {address}});
  }
}

Routes::~Routes() { free(table_.load()); }

void Routes::free(Table* table) {
  while (table != nullptr) delete std::exchange(table, table->older);
}

void Routes::replace(std::vector<Route> routes) {
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

Routes::Held Routes::to(const Address& destination) const {
  users_->readers.fetch_add(1);
  if (const Table* const table = table_.load()) {
    const auto found = table->routes.find(destination);
    if (found != table->routes.end()) return Held(&found->second, Release{&users_->readers});
  }
  users_->readers.fetch_sub(1);
  return Held(nullptr, Release{nullptr});
}

void Routes::set_ports(PortRange ports) { ports_.store(ports, std::memory_order_relaxed); }

PortRange Routes::ports() const { return ports_.load(std::memory_order_relaxed); }

void Routes::skip(uint16_t port) {
  skipped_[port / 64].fetch_or(uint64_t{1} << port % 64, std::memory_order_relaxed);
}

bool Routes::skipped(uint16_t port) const {
  return skipped_[port / 64].load(std::memory_order_relaxed) >> port % 64 & 1;
}

}  // namespace crux::transport
