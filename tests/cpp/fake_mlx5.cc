// A libmlx5.so.1 for the device in memory: what changes a live queue pair, and what was asked of
// it.
#include <dlfcn.h>
#include <infiniband/mlx5dv.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

struct mlx5dv_sched_node {
  ibv_context* context;
};
struct mlx5dv_sched_leaf {
  uint32_t max_avg_bw;
};

namespace {

std::mutex mutex;
std::map<uint32_t, const mlx5dv_sched_leaf*> leaves_of;
std::atomic<int> elements{0};
int port_error = 0, rate_error = 0;

}  // namespace

extern "C" {

void fake_mlx5_refuse(int port, int rate) {
  port_error = port;
  rate_error = rate;
}
int fake_mlx5_elements() { return elements; }
uint32_t fake_mlx5_rate(uint32_t qp_num) {
  const std::lock_guard lock(mutex);
  const auto found = leaves_of.find(qp_num);
  return found == leaves_of.end() ? UINT32_MAX : found->second->max_avg_bw;
}

bool mlx5dv_is_supported(ibv_device*) { return true; }

int mlx5dv_modify_qp_udp_sport(ibv_qp* qp, uint16_t udp_sport) {
  if (port_error != 0) return port_error;
  using Set = void (*)(ibv_qp*, uint16_t);
  reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "fake_set_live_port"))(qp, udp_sport);
  return 0;
}

mlx5dv_sched_node* mlx5dv_sched_node_create(ibv_context* context, const mlx5dv_sched_attr* given) {
  if (rate_error != 0 || given->parent != nullptr || given->flags != 0) {
    errno = rate_error != 0 ? rate_error : EINVAL;
    return nullptr;
  }
  ++elements;
  return new mlx5dv_sched_node{context};
}
int mlx5dv_sched_node_destroy(mlx5dv_sched_node* node) {
  --elements;
  delete node;
  return 0;
}
mlx5dv_sched_leaf* mlx5dv_sched_leaf_create(ibv_context* context, const mlx5dv_sched_attr* given) {
  if (given->parent == nullptr || given->parent->context != context ||
      given->flags != MLX5DV_SCHED_ELEM_ATTR_FLAGS_MAX_AVG_BW) {
    errno = EINVAL;
    return nullptr;
  }
  ++elements;
  return new mlx5dv_sched_leaf{given->max_avg_bw};
}
int mlx5dv_sched_leaf_modify(mlx5dv_sched_leaf* leaf, const mlx5dv_sched_attr* given) {
  if (rate_error != 0) return rate_error;
  leaf->max_avg_bw = given->max_avg_bw;
  return 0;
}
int mlx5dv_sched_leaf_destroy(mlx5dv_sched_leaf* leaf) {
  const std::lock_guard lock(mutex);
  for (auto it = leaves_of.begin(); it != leaves_of.end();)
    it = it->second == leaf ? leaves_of.erase(it) : std::next(it);
  --elements;
  delete leaf;
  return 0;
}
int mlx5dv_modify_qp_sched_elem(ibv_qp* qp, const mlx5dv_sched_leaf* requestor,
                                const mlx5dv_sched_leaf*) {
  const std::lock_guard lock(mutex);
  leaves_of[qp->qp_num] = requestor;
  return 0;
}

}  // extern "C"
