// Calls from outside. Those of the stand-in for libibverbs fail open: whatever goes wrong here, the
// real call is made with the caller's own arguments. Those of the C interface check their
// arguments, and let no exception out.
#include <infiniband/verbs.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>

#include "../inside.h"
#include "../standin/standin_abi.h"
#include "../transport.h"
#include "mlx5.h"
#include "queue_pairs.h"

namespace crux::transport::verbs {
namespace {

std::atomic<bool> attached{false};

bool enabled() { return transport() != nullptr && transport()->enabled; }

int close_device(const crux_verbs_calls* real, ibv_context* context) {
  const Uncancelled whole;
  forget_posts(context);
  if (enabled()) mlx5::forget(context);
  return real->close_device(context);
}

ibv_qp* create_qp(const crux_verbs_calls* real, ibv_pd* pd, ibv_qp_init_attr* attributes) {
  const Uncancelled whole;
  ibv_qp* const handle = real->create_qp(pd, attributes);
  if (handle == nullptr || !enabled()) return handle;
  try {
    queue_pairs().add(*real, handle);
  } catch (const std::exception&) {
    // Out of memory. The first ibv_modify_qp() tries again.
  }
  return handle;
}

// A datagram queue pair has an address for each message, not one of its own.
bool is_connected_type(ibv_qp_type type) { return type == IBV_QPT_RC || type == IBV_QPT_UC; }

int modify_qp(const crux_verbs_calls* real, ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  const Uncancelled whole;
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
  const Uncancelled whole;
  const QueuePairs::Shared pair = queue_pairs().find(qp);
  return pair ? queue_pairs().destroy(pair) : real->destroy_qp(qp);
}

constexpr crux_verbs_hooks kHooks = {close_device, create_qp, modify_qp, destroy_qp};

}  // namespace
}  // namespace crux::transport::verbs

namespace crux::transport {

bool sees_queue_pairs() { return verbs::attached.load(); }

void list_queue_pairs(std::vector<crux_connection>& out) {
  if (!verbs::attached.load()) return;
  for (const auto& pair : verbs::queue_pairs().all()) out.push_back(pair->describe());
}

}  // namespace crux::transport

extern "C" const crux_verbs_hooks* crux_transport_attach_standin(int abi) {
  if (abi != CRUX_STANDIN_ABI) return nullptr;
  crux::transport::verbs::attached.store(true);
  return &crux::transport::verbs::kHooks;
}

using namespace crux::transport;  // NOLINT: this file is the other side of that namespace

int crux_transport_label(int32_t label, const char* owner, int32_t dscp) try {
  if (label < 1 || label > 255 || dscp < -1 || dscp > 63 || owner == nullptr || *owner == '\0')
    return EINVAL;
  verbs::queue_pairs().labels.set(static_cast<uint8_t>(label), {to_name(owner), dscp});
  return 0;
} catch (const std::exception&) {
  return ENOMEM;
}

int crux_transport_change_queue_pair(uint64_t id, uint32_t udp_port, uint64_t rate_Bps,
                                     crux_queue_pair_outcome* out) try {
  const Uncancelled whole;
  if (udp_port > 65535) return EINVAL;
  const auto pair = verbs::queue_pairs().find(id);
  const verbs::Outcome outcome =
      pair ? verbs::change(*pair, static_cast<uint16_t>(udp_port), rate_Bps)
           : verbs::Outcome{CRUX_UNTOUCHED, ENOENT, "there is no such queue pair"};
  if (out != nullptr) {
    *out = {};
    out->how = outcome.how;
    out->error = outcome.error;
    std::strncpy(out->reason, outcome.reason, sizeof out->reason - 1);
  }
  return outcome.error;
} catch (const std::exception&) {
  return ENOMEM;
}
