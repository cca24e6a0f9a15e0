// The queue pairs of this process, and how they are connected.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../routes.h"
#include "labels.h"
#include "queue_pair.h"

namespace crux::transport::verbs {

class QueuePairs {
 public:
  using Shared = std::shared_ptr<QueuePair>;

  // Adds a queue pair; replaces a destroyed one that had the same address.
  Shared add(const crux_verbs_calls& real, ibv_qp* handle);
  // Also adds one that was created without this library: ibv_create_qp_ex() is an inline call.
  Shared find_or_add(const crux_verbs_calls& real, ibv_qp* handle);
  Shared find(uint64_t id) const;
  Shared find(const ibv_qp* handle) const;
  // In the order in which they were created.
  std::vector<Shared> all() const;

  // ibv_modify_qp() to RTR, with the address vector that label and route ask for. If the device
  // refuses that one, the caller's own address vector is used.
  int connect(QueuePair& pair, const Transition& given);
  // Any other ibv_modify_qp().
  int modify(QueuePair& pair, const Transition& given);

  // ibv_destroy_qp().
  int destroy(const Shared& pair);

  Labels labels;

 private:
  uint16_t take_port(const Route& route, QueuePair& pair);

  mutable std::mutex mutex_;
  uint64_t last_id_ = 0;
  std::unordered_map<const ibv_qp*, Shared> by_handle_;
};

// Those of this process; never destroyed, because queue pairs may outlive static objects. A child
// begins with none.
QueuePairs& queue_pairs();

}  // namespace crux::transport::verbs
