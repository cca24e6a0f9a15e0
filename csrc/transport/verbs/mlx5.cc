#include "mlx5.h"

#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "../wiped.h"

namespace crux::transport::verbs {
namespace {

// As in <infiniband/mlx5dv.h> since rdma-core 33. That header may not be installed.
struct SchedulingAttributes {
  mlx5dv_sched_node* parent;
  uint32_t flags;
  uint32_t bw_share;
  uint32_t max_avg_bw;  // Mbit/s; 0: no limit
  uint64_t comp_mask;
};
constexpr uint32_t kMaxAverageBandwidth = 1u << 1;
constexpr uint64_t kBytesPerSecondOfMbit = 125000;

struct Calls {
  bool (*is_supported)(ibv_device*) = nullptr;
  int (*modify_qp_udp_sport)(ibv_qp*, uint16_t) = nullptr;
  mlx5dv_sched_node* (*node_create)(ibv_context*, const SchedulingAttributes*) = nullptr;
  int (*node_destroy)(mlx5dv_sched_node*) = nullptr;
  mlx5dv_sched_leaf* (*leaf_create)(ibv_context*, const SchedulingAttributes*) = nullptr;
  int (*leaf_modify)(mlx5dv_sched_leaf*, const SchedulingAttributes*) = nullptr;
  int (*leaf_destroy)(mlx5dv_sched_leaf*) = nullptr;
  int (*modify_qp_sched_elem)(ibv_qp*, const mlx5dv_sched_leaf*,
                              const mlx5dv_sched_leaf*) = nullptr;

  bool can_limit() const {
    return node_create && node_destroy && leaf_create && leaf_modify && leaf_destroy &&
           modify_qp_sched_elem;
  }
};

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

const Calls& calls() {
  static const Calls found = [] {
    Calls made;
    void* const library = ::dlopen("libmlx5.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) return made;
    find(library, "mlx5dv_is_supported", made.is_supported);
    find(library, "mlx5dv_modify_qp_udp_sport", made.modify_qp_udp_sport);
    find(library, "mlx5dv_sched_node_create", made.node_create);
    find(library, "mlx5dv_sched_node_destroy", made.node_destroy);
    find(library, "mlx5dv_sched_leaf_create", made.leaf_create);
    find(library, "mlx5dv_sched_leaf_modify", made.leaf_modify);
    find(library, "mlx5dv_sched_leaf_destroy", made.leaf_destroy);
    find(library, "mlx5dv_modify_qp_sched_elem", made.modify_qp_sched_elem);
    return made;
  }();
  return found;
}

uint32_t mbit_per_second(uint64_t rate_Bps) {
  if (rate_Bps == 0) return 0;
  const uint64_t rounded = rate_Bps / kBytesPerSecondOfMbit;  // down, so as not to exceed it
  return static_cast<uint32_t>(std::clamp<uint64_t>(rounded, 1, UINT32_MAX));
}

bool drives(const ibv_context* context) {
  return calls().is_supported != nullptr && calls().is_supported(context->device);
}

int failure() { return errno != 0 ? errno : EIO; }

// The root of each context's scheduling elements. It exists while a limit hangs below it.
class Roots {
 public:
  std::shared_ptr<mlx5dv_sched_node> of(ibv_context* context) {
    if (auto root = known(context, nullptr)) return root;
    const SchedulingAttributes attributes{};
    mlx5dv_sched_node* const made = calls().node_create(context, &attributes);
    if (made == nullptr) return nullptr;
    return known(context, std::shared_ptr<mlx5dv_sched_node>(made, calls().node_destroy));
  }
  void forget(const ibv_context* context) {
    const std::lock_guard lock(mutex_);
    roots_.erase(context);
  }

 private:
  // The root of `context`: `made`, unless there is one. The lock is never held over a call of the
  // device.
  std::shared_ptr<mlx5dv_sched_node> known(ibv_context* context,
                                           std::shared_ptr<mlx5dv_sched_node> made) {
    const std::lock_guard lock(mutex_);
    std::weak_ptr<mlx5dv_sched_node>& root = roots_[context];
    if (auto first = root.lock()) return first;
    root = made;
    return made;
  }

  std::mutex mutex_;
  std::map<const ibv_context*, std::weak_ptr<mlx5dv_sched_node>> roots_;
};

Roots& roots() { return own<Roots>(); }

}  // namespace

RateLimit::~RateLimit() { calls().leaf_destroy(leaf_); }

int RateLimit::set(uint64_t rate_Bps) {
  SchedulingAttributes attributes{};
  attributes.parent = root_.get();
  attributes.flags = kMaxAverageBandwidth;
  attributes.max_avg_bw = mbit_per_second(rate_Bps);
  return calls().leaf_modify(leaf_, &attributes);
}

int RateLimit::apply(ibv_qp* handle) {
  return calls().modify_qp_sched_elem(handle, leaf_, nullptr);
}

namespace mlx5 {

int set_udp_port(ibv_qp* handle, uint16_t udp_port) {
  if (!drives(handle->context) || calls().modify_qp_udp_sport == nullptr) return EOPNOTSUPP;
  return calls().modify_qp_udp_sport(handle, udp_port);
}

int limit_rate(ibv_qp* handle, uint64_t rate_Bps, std::shared_ptr<RateLimit>& made) {
  if (!drives(handle->context) || !calls().can_limit()) return EOPNOTSUPP;
  errno = 0;
  std::shared_ptr<mlx5dv_sched_node> root = roots().of(handle->context);
  if (!root) return failure();
  SchedulingAttributes attributes{};
  attributes.parent = root.get();
  attributes.flags = kMaxAverageBandwidth;
  attributes.max_avg_bw = mbit_per_second(rate_Bps);
  mlx5dv_sched_leaf* const leaf = calls().leaf_create(handle->context, &attributes);
  if (leaf == nullptr) return failure();
  auto limit = std::make_shared<RateLimit>(std::move(root), leaf);
  if (const int result = limit->apply(handle)) return result;
  made = std::move(limit);
  return 0;
}

void forget(const ibv_context* context) { roots().forget(context); }

}  // namespace mlx5
}  // namespace crux::transport::verbs
