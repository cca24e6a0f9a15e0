// What the stand-in for libibverbs calls. Fails open: whatever goes wrong here, the real call is
// made as it was given.
#include <infiniband/verbs.h>
#include <unistd.h>

#include <atomic>
#include <exception>

#include "../queue_pairs.h"
#include "../standin/standin_abi.h"
#include "../transport.h"
#include "followed.h"
#include "mlx5.h"
#include "queue_pairs.h"

namespace crux::transport::verbs {
namespace {

std::atomic<bool> attached{false};
std::atomic<pid_t> attached_process{0};

bool enabled() { return transport() != nullptr && transport()->enabled; }

// Runs `watch` beside a call that has succeeded.
template <typename Watch>
void beside(Watch watch) {
  if (!enabled()) return;
  try {
    watch();
  } catch (const std::exception&) {
    // Out of memory: what was called works, and is not followed.
  }
}

ibv_context* open_device(const crux_verbs_calls* real, ibv_device* device) {
  ibv_context* const context = real->open_device(device);
  if (context != nullptr) beside([context] { followed().opened(context); });
  return context;
}

int close_device(const crux_verbs_calls* real, ibv_context* context) {
  beside([context] {
    followed().closes(context);
    mlx5::forget(context);
  });
  return real->close_device(context);
}

ibv_cq* create_cq(const crux_verbs_calls* real, ibv_context* context, int cqe, void* cq_context,
                  ibv_comp_channel* channel, int comp_vector) {
  return followed().create_cq(*real, context, cqe, cq_context, channel, comp_vector);
}

int destroy_cq(const crux_verbs_calls* real, ibv_cq* cq) {
  // A thread that collects from it ends first.
  const auto known = followed().cq(cq);
  if (!known) return real->destroy_cq(cq);
  known->close();
  const int result = real->destroy_cq(cq);
  if (result == 0) {
    followed().cq_closes(cq, known);
  } else {
    known->reopen();
  }
  return result;
}

ibv_qp* create_qp(const crux_verbs_calls* real, ibv_pd* pd, ibv_qp_init_attr* attributes) {
  ibv_qp* const handle = real->create_qp(pd, attributes);
  // Where this fails, the first ibv_modify_qp() tries again.
  if (handle != nullptr) {
    beside([&] { followed().created(queue_pairs().add(*real, handle), *attributes); });
  }
  return handle;
}

// Of datagram queue pairs each message has its own address.
bool is_connected_type(ibv_qp_type type) { return type == IBV_QPT_RC || type == IBV_QPT_UC; }

int modify_qp(const crux_verbs_calls* real, ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  if (!enabled() || !is_connected_type(qp->qp_type)) return real->modify_qp(qp, attributes, mask);
  QueuePairs::Shared pair;
  try {
    pair = queue_pairs().find_or_add(*real, qp);
  } catch (const std::exception&) {
    return real->modify_qp(qp, attributes, mask);
  }
  const Transition given = Transition::copy(*attributes, mask);
  const bool connects = (mask & IBV_QP_STATE) && attributes->qp_state == IBV_QPS_RTR &&
                        (mask & IBV_QP_AV) && attributes->ah_attr.is_global;
  return connects ? queue_pairs().connect(*pair, given) : queue_pairs().modify(*pair, given);
}

int destroy_qp(const crux_verbs_calls* real, ibv_qp* qp) {
  const QueuePairs::Shared pair = queue_pairs().find(qp);
  return pair ? queue_pairs().destroy(pair) : real->destroy_qp(qp);
}

constexpr crux_verbs_hooks kHooks = {open_device, close_device, create_cq, destroy_cq,
                                     create_qp,   modify_qp,    destroy_qp};

}  // namespace
}  // namespace crux::transport::verbs

namespace crux::transport {

bool sees_queue_pairs() { return verbs::attached.load(); }

void list_queue_pairs(std::vector<crux_connection>& out) {
  // A forked child has none, and whoever held a lock does not exist there.
  if (verbs::attached_process.load() != ::getpid()) return;
  for (const auto& pair : verbs::queue_pairs().all()) out.push_back(pair->describe());
}

}  // namespace crux::transport

extern "C" const crux_verbs_hooks* crux_transport_attach_standin(int abi) {
  if (abi != CRUX_STANDIN_ABI) return nullptr;
  crux::transport::verbs::attached.store(true);
  crux::transport::verbs::attached_process.store(::getpid());
  return &crux::transport::verbs::kHooks;
}
