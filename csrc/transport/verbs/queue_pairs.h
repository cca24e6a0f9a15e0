// The queue pairs of this process, and how they are connected.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "../routes.h"
#include "labels.h"
#include "queue_pair.h"

namespace crux::transport::verbs {

class QueuePairs {
 public:
  using Shared = std::shared_ptr<QueuePair>;

  // Known from now on; again after ibv_destroy_qp() of another at the same address.
  Shared add(const crux_verbs_calls& real, ibv_qp* handle);
  // Also those that came into being without this library: ibv_create_qp_ex() is an inline call.
  Shared find_or_add(const crux_verbs_calls& real, ibv_qp* handle);
  Shared find(uint64_t id) const;
  Shared find(const ibv_qp* handle) const;
  std::vector<Shared> all() const;

  // ibv_modify_qp() on the way to RTR: with the address vector that label and route ask for. Where
  // the device refuses that, with the one that was given.
  int connect(QueuePair& pair, const Transition& given);
  // Any other ibv_modify_qp().
  int modify(QueuePair& pair, const Transition& given);

  // ibv_destroy_qp().
  int destroy(const Shared& pair);

  // Whether a queue pair in use may be reset: this one; those of this owner; all.
  bool allow_reset(uint64_t id, bool allow);
  void allow_reset(const char* owner, bool allow);
  // With the pair's mutex held.
  bool allows_reset(const QueuePair& pair) const;

  Labels labels;

 private:
  uint16_t take_port(const Route& route, QueuePair& pair);

  mutable std::mutex mutex_;
  mutable std::mutex allowed_mutex_;  // taken last
  std::set<Name> allowed_;
  uint64_t last_id_ = 0;
  std::unordered_map<const ibv_qp*, Shared> by_handle_;
};

// Of this process; never destroyed, as queue pairs may outlive static objects.
QueuePairs& queue_pairs();

}  // namespace crux::transport::verbs
