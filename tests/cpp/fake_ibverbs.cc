#include "fake_ibverbs.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

namespace fake_verbs {
namespace {

struct Qp : ibv_qp {
  ibv_ah_attr path;
  uint16_t live_udp_port;
};

std::mutex mutex;  // guards everything
std::map<uint32_t, Qp*> queue_pairs;
uint32_t last_number = 0x100;
int label_error = 0;

int close_device(ibv_context* context) {
  delete context;
  return 0;
}

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* given) {
  const std::lock_guard lock(mutex);
  auto* const qp = new Qp{};
  qp->context = pd->context;
  qp->pd = pd;
  qp->qp_type = given->qp_type;
  qp->qp_num = ++last_number;
  qp->state = IBV_QPS_RESET;
  queue_pairs[qp->qp_num] = qp;
  return qp;
}

int destroy_qp(ibv_qp* handle) {
  const std::lock_guard lock(mutex);
  queue_pairs.erase(handle->qp_num);
  delete static_cast<Qp*>(handle);
  return 0;
}

bool is_next(ibv_qp_state from, ibv_qp_state to) {
  switch (to) {
    case IBV_QPS_RESET:
      return true;
    case IBV_QPS_INIT:
      return from == IBV_QPS_RESET;
    case IBV_QPS_RTR:
      return from == IBV_QPS_INIT;
    case IBV_QPS_RTS:
      return from == IBV_QPS_RTR || from == IBV_QPS_RTS;
    default:
      return false;
  }
}

int modify_qp(ibv_qp* handle, ibv_qp_attr* given, int mask) {
  const std::lock_guard lock(mutex);
  Qp& qp = *static_cast<Qp*>(handle);
  const ibv_qp_state to = mask & IBV_QP_STATE ? given->qp_state : qp.state;
  if (!is_next(qp.state, to)) return EINVAL;
  if (mask & IBV_QP_AV) {
    if (label_error != 0 && given->ah_attr.grh.flow_label != 0) return label_error;
    if (qp.state == IBV_QPS_RTS) return EINVAL;
    qp.path = given->ah_attr;
  }
  qp.state = to;
  return 0;
}

int query_gid(ibv_context* context, uint8_t, int, ibv_gid* gid) {
  *gid = {};
  gid->raw[10] = gid->raw[11] = 0xff;
  gid->raw[12] = 10;
  gid->raw[13] = 9;
  gid->raw[15] = context->device == device(0) ? 1 : 2;
  return 0;
}

}  // namespace

const crux_verbs_calls& calls() {
  static const crux_verbs_calls table = {close_device, create_qp, modify_qp, destroy_qp, query_gid};
  return table;
}

// Takes requests up to one without a local buffer.
static int post_send(ibv_qp*, ibv_send_wr* requests, ibv_send_wr** bad) {
  for (; requests != nullptr; requests = requests->next) {
    if (requests->num_sge == 0 && requests->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) {
      *bad = requests;
      return EINVAL;
    }
  }
  return 0;
}

ibv_context* open_device(ibv_device* device) {
  auto* const context = new ibv_context{};
  context->ops.post_send = post_send;
  context->device = device;
  return context;
}

ibv_device* device(int index) {
  static ibv_device devices[2] = {};
  std::strcpy(devices[index].name, index == 0 ? "fake0" : "fake1");
  return &devices[index];
}

void refuse_flow_labels(int error) {
  const std::lock_guard lock(mutex);
  label_error = error;
}

void set_live_port(ibv_qp* handle, uint16_t udp_port) {
  const std::lock_guard lock(mutex);
  static_cast<Qp*>(handle)->live_udp_port = udp_port;
}

Wire wire(uint32_t qp_num) {
  const std::lock_guard lock(mutex);
  const Qp& qp = *queue_pairs.at(qp_num);
  const uint32_t label = qp.path.grh.flow_label;
  const uint16_t udp_port = label == 0 ? 0 : ibv_flow_label_to_udp_sport(label);
  return {qp.path.grh.traffic_class, qp.path.sl,
          qp.live_udp_port != 0 ? qp.live_udp_port : udp_port};
}

int open_queue_pairs() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(queue_pairs.size());
}

}  // namespace fake_verbs
