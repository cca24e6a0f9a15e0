// A program's half of verbs for tests in Python: connects pairs over devices 0 and 1 and sends
// between their ends. Linked to libibverbs.so.1 as any program is.
#include <infiniband/verbs.h>

#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

namespace {

struct End {
  ibv_context* context;
  ibv_pd* pd;
  ibv_cq* cq;
  ibv_qp* qp;
  ibv_gid gid;
  char data[64];
};
std::vector<End*> ends;

bool modify(End& end, ibv_qp_attr attributes, int mask) {
  return ibv_modify_qp(end.qp, &attributes, mask) == 0;
}

bool connect(End& from, const End& to, uint8_t traffic_class) {
  ibv_qp_attr init{}, rtr{}, rts{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = 1;
  rtr.qp_state = IBV_QPS_RTR;
  rtr.dest_qp_num = to.qp->qp_num;
  rtr.ah_attr.is_global = 1;
  rtr.ah_attr.port_num = 1;
  rtr.ah_attr.grh.sgid_index = 1;
  rtr.ah_attr.grh.dgid = to.gid;
  rtr.ah_attr.grh.traffic_class = traffic_class;
  rts.qp_state = IBV_QPS_RTS;
  return modify(from, init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) &&
         modify(from, rtr,
                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) &&
         modify(from, rts,
                IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                    IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

bool await_one(End& end) {
  ibv_wc completion{};
  for (const time_t start = time(nullptr); time(nullptr) < start + 10;) {
    if (ibv_poll_cq(end.cq, 1, &completion) == 1) return completion.status == IBV_WC_SUCCESS;
  }
  return false;
}

}  // namespace

extern "C" {

// Makes a pair whose ends are `2 * n` and `2 * n + 1`; false where something was refused.
bool client_pair(uint8_t traffic_class) {
  ibv_device** const devices = ibv_get_device_list(nullptr);
  for (int i = 0; i < 2; ++i) {
    auto* const end = new End{};
    end->context = ibv_open_device(devices[i]);
    end->pd = ibv_alloc_pd(end->context);
    end->cq = ibv_create_cq(end->context, 16, nullptr, nullptr, 0);
    ibv_query_gid(end->context, 1, 1, &end->gid);
    ibv_qp_init_attr given{};
    given.send_cq = given.recv_cq = end->cq;
    given.qp_type = IBV_QPT_RC;
    given.cap = {8, 8, 1, 1, 0};
    end->qp = ibv_create_qp(end->pd, &given);
    ends.push_back(end);
  }
  ibv_free_device_list(devices);
  End &a = *ends[ends.size() - 2], &b = *ends.back();
  return connect(a, b, traffic_class) && connect(b, a, traffic_class);
}

uint32_t client_number(int end) { return ends[end]->qp->qp_num; }

// One message from `end` to the other of its pair; whether it arrived unchanged.
bool client_send(int end, uint32_t what) {
  End &from = *ends[end], &to = *ends[end ^ 1];
  ibv_sge into{reinterpret_cast<uintptr_t>(to.data), sizeof to.data, 0};
  ibv_recv_wr receive{}, *bad_receive = nullptr;
  receive.sg_list = &into;
  receive.num_sge = 1;
  std::memset(from.data, 0, sizeof from.data);
  std::memcpy(from.data, &what, sizeof what);
  ibv_sge out_of{reinterpret_cast<uintptr_t>(from.data), sizeof from.data, 0};
  ibv_send_wr send{}, *bad_send = nullptr;
  send.sg_list = &out_of;
  send.num_sge = 1;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  return ibv_post_recv(to.qp, &receive, &bad_receive) == 0 &&
         ibv_post_send(from.qp, &send, &bad_send) == 0 && await_one(from) && await_one(to) &&
         std::memcmp(from.data, to.data, sizeof to.data) == 0;
}

// Ends everything; false where something is still in use.
bool client_close() {
  bool clean = true;
  for (End* end : ends) {
    clean &= ibv_destroy_qp(end->qp) == 0;
    clean &= ibv_destroy_cq(end->cq) == 0;
    clean &= ibv_dealloc_pd(end->pd) == 0;
    clean &= ibv_close_device(end->context) == 0;
    delete end;
  }
  ends.clear();
  return clean;
}

}  // extern "C"
