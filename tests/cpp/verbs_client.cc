// The verbs half of a program, for tests in Python: connects queue pairs of devices 0 and 1 to each
// other. It is linked to libibverbs.so.1 like any program.
#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

#include "rc_connect.h"

namespace {

struct End {
  ibv_context* context;
  ibv_pd* pd;
  ibv_qp* qp;
  ibv_gid gid;
};
std::vector<End*> ends;

bool connect(End& from, const End& to, uint8_t traffic_class) {
  const auto modify = [&](ibv_qp_attr& given, int mask) {
    return ibv_modify_qp(from.qp, &given, mask);
  };
  return rc_connect(to.qp->qp_num, to.gid, traffic_class, modify) == 0;
}

}  // namespace

extern "C" {

// Makes a pair whose ends are `2 * n` and `2 * n + 1`; false if a call was refused.
bool client_pair(uint8_t traffic_class) {
  ibv_device** const devices = ibv_get_device_list(nullptr);
  for (int i = 0; i < 2; ++i) {
    auto* const end = new End{};
    end->context = ibv_open_device(devices[i]);
    end->pd = ibv_alloc_pd(end->context);
    ibv_query_gid(end->context, 1, 1, &end->gid);
    ibv_qp_init_attr given{};
    given.qp_type = IBV_QPT_RC;
    end->qp = ibv_create_qp(end->pd, &given);
    ends.push_back(end);
  }
  ibv_free_device_list(devices);
  End &a = *ends[ends.size() - 2], &b = *ends.back();
  return connect(a, b, traffic_class) && connect(b, a, traffic_class);
}

uint32_t client_number(int end) { return ends[end]->qp->qp_num; }

// Posts a list of requests, one for each number of bytes; 0 bytes: one that the device refuses.
int client_post(int end, ibv_wr_opcode opcode, const uint32_t* bytes, int count) {
  std::vector<ibv_sge> buffers(count);
  std::vector<ibv_send_wr> requests(count);
  for (int i = 0; i < count; ++i) {
    buffers[i].length = bytes[i];
    requests[i].opcode = opcode;
    requests[i].sg_list = &buffers[i];
    requests[i].num_sge = bytes[i] != 0;
    requests[i].next = i + 1 < count ? &requests[i + 1] : nullptr;
  }
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(ends[end]->qp, requests.data(), &bad);
}

// Posts one request without the heap, as a signal handler may.
int client_post_one(int end, uint32_t bytes) {
  ibv_sge buffer{};
  buffer.length = bytes;
  ibv_send_wr request{}, *bad = nullptr;
  request.opcode = IBV_WR_SEND;
  request.sg_list = &buffer;
  request.num_sge = 1;
  return ibv_post_send(ends[end]->qp, &request, &bad);
}

// Destroys everything; false if something is still in use.
bool client_close() {
  bool clean = true;
  for (End* end : ends) {
    clean &= ibv_destroy_qp(end->qp) == 0;
    clean &= ibv_dealloc_pd(end->pd) == 0;
    clean &= ibv_close_device(end->context) == 0;
    delete end;
  }
  ends.clear();
  return clean;
}

}  // extern "C"
