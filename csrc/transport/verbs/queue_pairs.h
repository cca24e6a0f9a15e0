// The queue pairs of this process, and how they are connected.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../routes.h"
#include "../transport.h"
#include "../wiped.h"
#include "mlx5.h"
#include "queue_pair.h"

namespace crux::transport::verbs {

// A communicator has its own traffic class (NCCL's trafficClass), its label, which arrives in the
// address vector of each of its queue pairs.
struct Label {
  Name owner{};
  int dscp = -1;  // on the wire; -1: the label's own
};

// The communicators by label.
class Labels {
 public:
  void set(uint8_t traffic_class, const Label& label) {
    const std::lock_guard lock(mutex_);
    labels_[traffic_class] = label;
  }
  std::optional<Label> find(uint8_t traffic_class) const {
    const std::lock_guard lock(mutex_);
    return labels_[traffic_class];
  }

 private:
  mutable std::mutex mutex_;
  std::array<std::optional<Label>, 256> labels_;
};

class QueuePairs {
 public:
  using Shared = std::shared_ptr<QueuePair>;

  // Adds a queue pair; replaces a destroyed one that had the same address.
  Shared add(const crux_verbs_calls& real, ibv_qp* handle) {
    Shared pair;
    {
      const std::lock_guard lock(mutex_);
      pair = std::make_shared<QueuePair>(++last_id_, real, handle);
      by_handle_[handle] = pair;
    }
    count_posts(handle->context);
    return pair;
  }
  // Also adds one that was created without this library: ibv_create_qp_ex() is an inline call.
  Shared find_or_add(const crux_verbs_calls& real, ibv_qp* handle) {
    Shared pair = find(handle);
    if (pair && pair->number == handle->qp_num && pair->context == handle->context) return pair;
    return add(real, handle);
  }
  Shared find(uint64_t id) const {
    for (Shared& pair : all()) {
      if (pair->id == id) return std::move(pair);
    }
    return nullptr;
  }
  Shared find(const ibv_qp* handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = by_handle_.find(handle);
    return found == by_handle_.end() ? nullptr : found->second;
  }
  // In the order in which they were created.
  std::vector<Shared> all() const {
    std::vector<Shared> pairs;
    const std::lock_guard lock(mutex_);
    pairs.reserve(by_handle_.size());
    for (const auto& [handle, pair] : by_handle_) pairs.push_back(pair);
    std::sort(pairs.begin(), pairs.end(),
              [](const Shared& a, const Shared& b) { return a->id < b->id; });
    return pairs;
  }

  // ibv_modify_qp() to RTR, with the address vector that label and route ask for. If the device
  // refuses that one, the caller's own address vector is used.
  int connect(QueuePair& pair, const Transition& given) {
    const std::lock_guard calls(pair.calls);
    const Address peer = Address::v6(given.attributes.ah_attr.grh.dgid.raw);
    const Path asked = Path::of(given.attributes);
    Path wanted = asked;
    const Routes::Held route = transport()->routes.to(peer);
    if (route) {
      // A class that the program chose, as by NCCL_IB_TC, stays.
      const bool chosen = asked.traffic_class >> kEcnBits != 0;
      if (route->qp_dscp >= 0 && (route->overrides || !chosen)) wanted.give_dscp(route->qp_dscp);
      if (const uint16_t port = take_port(*route, pair)) wanted.flow_label = flow_label_of(port);
    }
    const std::optional<Label> label = labels.find(asked.traffic_class);
    if (label && label->dscp >= 0) wanted.give_dscp(label->dscp);

    Transition call = given;
    wanted.write(call.attributes);
    int refused = 0;
    int result = pair.real.modify_qp(pair.handle, &call.attributes, call.mask);
    if (result != 0 && !(wanted == asked)) {
      refused = result;
      call = given;
      result = pair.real.modify_qp(pair.handle, &call.attributes, call.mask);
    }
    const std::lock_guard lock(pair.mutex);
    if (label) pair.owner = label->owner;
    if (result != 0) {
      pair.udp_port = 0;
      return result;
    }
    pair.remember(call);
    pair.route_rate_Bps = route ? route->rate_Bps : 0;
    pair.error = refused;
    pair.how = refused != 0 ? CRUX_REFUSED : wanted == asked ? CRUX_UNTOUCHED : CRUX_AT_RTR;
    if (transport()->log) {
      std::fprintf(stderr, "crux_transport: queue pair 0x%x to 0x%x: class %u, UDP port %u%s\n",
                   pair.number, pair.peer_number, pair.path.traffic_class, pair.udp_port,
                   refused != 0 ? " (the device refused the planned ones)" : "");
    }
    return 0;
  }
  // Any other ibv_modify_qp().
  int modify(QueuePair& pair, const Transition& given) {
    const std::lock_guard calls(pair.calls);
    Transition call = given;
    const int result = pair.real.modify_qp(pair.handle, &call.attributes, call.mask);
    if (result != 0) return result;
    {
      const std::lock_guard lock(pair.mutex);
      pair.remember(call);
      if (pair.state != IBV_QPS_RTS || pair.route_rate_Bps == 0 || pair.rate_limit) return 0;
    }
    const int error = mlx5::limit_rate(pair.handle, pair.route_rate_Bps, pair.rate_limit);
    const std::lock_guard lock(pair.mutex);
    if (error == 0) pair.rate_Bps = pair.route_rate_Bps;
    pair.error = error;
    pair.route_rate_Bps = 0;
    return 0;
  }

  // ibv_destroy_qp().
  int destroy(const Shared& pair) {
    const std::lock_guard calls(pair->calls);
    // Removed before the call: afterwards another queue pair may have the same address.
    {
      const std::lock_guard lock(mutex_);
      const auto found = by_handle_.find(pair->handle);
      if (found != by_handle_.end() && found->second == pair) by_handle_.erase(found);
    }
    const uint64_t posted = pair->posted_bytes != nullptr ? pair->posted_bytes->load() : 0;
    end_counting(pair->handle);
    const int result = pair->real.destroy_qp(pair->handle);
    if (result != 0) {
      // It goes on, at the same place.
      if (PostedBytes* const again = begin_counting(pair->handle)) again->store(posted);
      const std::lock_guard lock(mutex_);
      by_handle_.try_emplace(pair->handle, pair);
      return result;
    }
    const std::lock_guard lock(pair->mutex);
    pair->is_destroyed = true;
    pair->rate_limit.reset();
    return 0;
  }

  Labels labels;

 private:
  // Takes the port of the route that the fewest queue pairs to its destination use. So the n-th
  // queue pair takes the n-th port, and a destroyed one leaves its port to the next.
  uint16_t take_port(const Route& route, QueuePair& pair) {
    std::vector<uint16_t> usable;
    for (uint16_t port : route.udp_ports) {
      if (port >= kFirstUdpPort) usable.push_back(port);
    }
    if (usable.empty()) return 0;
    std::unordered_map<uint16_t, size_t> users;
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, other] : by_handle_) {
      if (other.get() == &pair) continue;
      const std::lock_guard other_lock(other->mutex);
      if (other->peer == route.destination) ++users[other->udp_port];
    }
    const uint16_t port =
        *std::min_element(usable.begin(), usable.end(),
                          [&users](uint16_t a, uint16_t b) { return users[a] < users[b]; });
    const std::lock_guard pair_lock(pair.mutex);
    pair.peer = route.destination;
    pair.udp_port = port;
    return port;
  }

  mutable std::mutex mutex_;
  uint64_t last_id_ = 0;
  std::unordered_map<const ibv_qp*, Shared> by_handle_;
};

// The queue pairs of this process; never destroyed, because queue pairs may outlive static objects.
// A child begins with none.
inline QueuePairs& queue_pairs() { return own<QueuePairs>(); }

}  // namespace crux::transport::verbs
