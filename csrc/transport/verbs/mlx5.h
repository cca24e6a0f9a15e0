// What only mlx5 devices can change of a live queue pair, through libmlx5 where it is installed.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>

struct mlx5dv_sched_leaf;
struct mlx5dv_sched_node;

namespace crux::transport::verbs {

// A limit of one queue pair's rate, by a scheduling element of the device.
class RateLimit {
 public:
  RateLimit(std::shared_ptr<mlx5dv_sched_node> root, mlx5dv_sched_leaf* leaf)
      : root_(std::move(root)), leaf_(leaf) {}
  ~RateLimit();
  RateLimit(const RateLimit&) = delete;
  RateLimit& operator=(const RateLimit&) = delete;

  // 0 or an errno. `rate_Bps` 0: no limit.
  int set(uint64_t rate_Bps);
  // The queue pair sends by this limit; again after a reset.
  int apply(ibv_qp* handle);

 private:
  const std::shared_ptr<mlx5dv_sched_node> root_;
  mlx5dv_sched_leaf* const leaf_;
};

namespace mlx5 {

// Whether libmlx5 drives this device.
bool drives(const ibv_context* context);
// 0; EOPNOTSUPP where library or device can't; another errno.
int set_udp_port(ibv_qp* handle, uint16_t udp_port);
// Limits a queue pair that had no limit. 0 or an errno.
int limit_rate(ibv_qp* handle, uint64_t rate_Bps, std::shared_ptr<RateLimit>& made);
// The context is about to be closed.
void forget(const ibv_context* context);

}  // namespace mlx5
}  // namespace crux::transport::verbs
