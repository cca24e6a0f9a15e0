// Takes libibverbs as NCCL does: dlopen() of libibverbs.so, else of libibverbs.so.1, and dlvsym()
// with the version IBVERBS_1.1; it is linked to neither. Then it connects two queue pairs, sends
// messages both ways, and says where each function came from.
//
// Usage: dl_client DEVICE GID_INDEX DEVICE GID_INDEX
// Exit status: 0 all messages arrived in order and unchanged; 1 not; 2 something was refused.
#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// The header has inline versions of these under the same names.
#undef ibv_reg_mr
#undef ibv_query_port

namespace {

constexpr int kMessages = 20;
constexpr size_t kWords = 3000;
constexpr size_t kBytes = kWords * sizeof(uint32_t);
constexpr uint8_t kPort = 1;
constexpr std::chrono::seconds kPatience{10};

[[noreturn]] void refuse(const std::string& what) {
  std::fprintf(stderr, "dl_client: %s\n", what.c_str());
  std::exit(2);
}

void* open_library() {
  for (const char* name : {"libibverbs.so", "libibverbs.so.1"}) {
    if (void* library = dlopen(name, RTLD_NOW)) return library;
  }
  refuse(dlerror());
}

template <typename Function>
Function* find(void* library, const char* name) {
  void* const found = dlvsym(library, name, "IBVERBS_1.1");
  if (found == nullptr) refuse(dlerror());
  Dl_info from{};
  dladdr(found, &from);
  std::printf("%s %s\n", name, from.dli_fname);
  return reinterpret_cast<Function*>(found);
}

#define CALL(name) decltype(::name)* name = find<decltype(::name)>(library, #name)

struct Verbs {
  void* library = open_library();
  CALL(ibv_get_device_list);
  CALL(ibv_free_device_list);
  CALL(ibv_get_device_name);
  CALL(ibv_open_device);
  CALL(ibv_close_device);
  CALL(ibv_query_gid);
  CALL(ibv_alloc_pd);
  CALL(ibv_dealloc_pd);
  CALL(ibv_reg_mr);
  CALL(ibv_dereg_mr);
  CALL(ibv_create_cq);
  CALL(ibv_destroy_cq);
  CALL(ibv_create_qp);
  CALL(ibv_modify_qp);
  CALL(ibv_destroy_qp);
};

struct End {
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_mr* mr = nullptr;
  ibv_gid gid{};
  uint8_t gid_index = 0;
  std::vector<uint32_t> words = std::vector<uint32_t>(kWords);
};

End open_end(const Verbs& verbs, const char* device, const char* gid_index) {
  End end;
  int count = 0;
  ibv_device** const devices = verbs.ibv_get_device_list(&count);
  if (devices == nullptr) refuse("no devices");
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(verbs.ibv_get_device_name(devices[i]), device) == 0) {
      end.context = verbs.ibv_open_device(devices[i]);
    }
  }
  verbs.ibv_free_device_list(devices);
  if (end.context == nullptr) refuse(std::string("can't open ") + device);
  end.gid_index = static_cast<uint8_t>(std::atoi(gid_index));
  if (verbs.ibv_query_gid(end.context, kPort, end.gid_index, &end.gid) != 0) refuse("no such GID");
  end.pd = verbs.ibv_alloc_pd(end.context);
  end.mr = verbs.ibv_reg_mr(end.pd, end.words.data(), kBytes, IBV_ACCESS_LOCAL_WRITE);
  end.cq = verbs.ibv_create_cq(end.context, 64, nullptr, nullptr, 0);
  if (end.mr == nullptr || end.cq == nullptr) refuse("no memory region or completion queue");
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = end.cq;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = wanted.cap.max_recv_wr = 4;
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  end.qp = verbs.ibv_create_qp(end.pd, &wanted);
  if (end.qp == nullptr) refuse("no queue pair");
  return end;
}

void close_end(const Verbs& verbs, End& end) {
  const bool closed = verbs.ibv_destroy_qp(end.qp) == 0 && verbs.ibv_destroy_cq(end.cq) == 0 &&
                      verbs.ibv_dereg_mr(end.mr) == 0 && verbs.ibv_dealloc_pd(end.pd) == 0 &&
                      verbs.ibv_close_device(end.context) == 0;
  if (!closed) refuse("something is still in use");
}

void modify(const Verbs& verbs, const End& end, ibv_qp_attr attributes, int mask) {
  if (const int error = verbs.ibv_modify_qp(end.qp, &attributes, mask)) {
    refuse("ibv_modify_qp to state " + std::to_string(attributes.qp_state) + ": " +
           std::strerror(error));
  }
}

void connect(const Verbs& verbs, const End& end, const End& peer) {
  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = kPort;
  modify(verbs, end, init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  ibv_qp_attr receive{};
  receive.qp_state = IBV_QPS_RTR;
  receive.path_mtu = IBV_MTU_4096;
  receive.dest_qp_num = peer.qp->qp_num;
  receive.max_dest_rd_atomic = 1;
  receive.min_rnr_timer = 12;
  receive.ah_attr.is_global = 1;
  receive.ah_attr.port_num = kPort;
  receive.ah_attr.grh.dgid = peer.gid;
  receive.ah_attr.grh.sgid_index = end.gid_index;
  receive.ah_attr.grh.hop_limit = 64;
  modify(verbs, end, receive,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  ibv_qp_attr send{};
  send.qp_state = IBV_QPS_RTS;
  send.timeout = 17;
  send.retry_cnt = send.rnr_retry = 7;
  send.max_rd_atomic = 1;
  modify(verbs, end, send,
         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
             IBV_QP_MAX_QP_RD_ATOMIC);
}

bool completed(ibv_cq* cq) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  ibv_wc completion{};
  while (std::chrono::steady_clock::now() < deadline) {
    if (ibv_poll_cq(cq, 1, &completion) > 0) return completion.status == IBV_WC_SUCCESS;
  }
  return false;
}

bool send(End& from, End& to, uint32_t number) {
  for (size_t i = 0; i < kWords; ++i) from.words[i] = number * 2654435761u + i;
  ibv_sge taken{reinterpret_cast<uint64_t>(to.words.data()), kBytes, to.mr->lkey};
  ibv_sge given{reinterpret_cast<uint64_t>(from.words.data()), kBytes, from.mr->lkey};
  ibv_recv_wr receive{};
  receive.sg_list = &taken;
  receive.num_sge = 1;
  ibv_send_wr request{};
  request.sg_list = &given;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_recv_wr* bad_receive = nullptr;
  ibv_send_wr* bad_request = nullptr;
  return ibv_post_recv(to.qp, &receive, &bad_receive) == 0 &&
         ibv_post_send(from.qp, &request, &bad_request) == 0 && completed(to.cq) &&
         completed(from.cq) && to.words == from.words;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) refuse("usage: dl_client DEVICE GID_INDEX DEVICE GID_INDEX");
  const Verbs verbs;
  End a = open_end(verbs, arguments[1], arguments[2]);
  End b = open_end(verbs, arguments[3], arguments[4]);
  connect(verbs, a, b);
  connect(verbs, b, a);
  int arrived = 0;
  for (uint32_t i = 0; i < kMessages / 2; ++i) arrived += send(a, b, i) + send(b, a, i);
  close_end(verbs, a);
  close_end(verbs, b);
  std::printf("%d of %d messages\n", arrived, kMessages);
  return arrived == kMessages ? 0 : 1;
}
