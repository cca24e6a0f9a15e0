// Calls of libmlx5 that change a live queue pair. Without libmlx5 they return EOPNOTSUPP.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>

struct mlx5dv_sched_leaf;
struct mlx5dv_sched_node;

namespace crux::transport::verbs {

// Limits the rate of one queue pair by a scheduling element of the device.
class RateLimit {
 public:
  RateLimit(std::shared_ptr<mlx5dv_sched_node> root, mlx5dv_sched_leaf* leaf)
      : root_(std::move(root)), leaf_(leaf) {}
  ~RateLimit();
  RateLimit(const RateLimit&) = delete;
  RateLimit& operator=(const RateLimit&) = delete;

  // 0 or an errno. `rate_Bps` 0: no limit.
  int set(uint64_t rate_Bps);
  // Makes the queue pair obey the limit. 0 or an errno.
  int apply(ibv_qp* handle);

 private:
  const std::shared_ptr<mlx5dv_sched_node> root_;
  mlx5dv_sched_leaf* const leaf_;
};

namespace mlx5 {

// 0, EOPNOTSUPP if the library or the device has no such call, or another errno.
int set_udp_port(ibv_qp* handle, uint16_t udp_port);
// Limits a queue pair that has no limit yet. 0 or an errno.
int limit_rate(ibv_qp* handle, uint64_t rate_Bps, std::shared_ptr<RateLimit>& made);
// To be called before the context is closed.
void forget(const ibv_context* context);

}  // namespace mlx5
}  // namespace crux::transport::verbs
