// Changes path and class of two connected queue pairs again and again while messages go both ways,
// and checks that none is lost, misplaced or altered.
//
// Usage: live_change DEVICE GID_INDEX DEVICE GID_INDEX CHANGES PORTS PORTS
// under the stand-in. PORTS are UDP source ports with commas, of the first and the second end; the
// changes take the ends in turn, and go around the ports and the DSCP values 1 to 63.
//
// Prints a line of JSON for each change, and one for the messages.
// Exit status: 0 all messages arrived in order and unchanged; 1 not; 2 something was refused.
#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "crux_transport.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint8_t kPort = 1;
constexpr uint32_t kWindow = 32;      // messages of one direction under way
constexpr uint32_t kSignalEvery = 4;  // of the sends, as NCCL too asks for few completions
constexpr size_t kWords = 2500;       // three packets
constexpr size_t kBytes = kWords * sizeof(uint32_t);
constexpr uint32_t kBetweenChanges = 3;  // messages, in the changed direction
constexpr uint32_t kTimeoutMs = 3000;
constexpr std::chrono::seconds kPatience{20};

[[noreturn]] void refuse(const std::string& what) {
  std::fprintf(stderr, "live_change: %s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(2);  // messages may be on their way in another thread
}

// The library is loaded before this program, which is not linked to it.
template <typename Function>
Function* find(const char* name) {
  void* const found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) refuse(std::string(name) + " is not loaded");
  return reinterpret_cast<Function*>(found);
}

#define FIND(name) find<decltype(name)>(#name)

struct End {
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq* send_cq = nullptr;
  ibv_cq* recv_cq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_mr* mr = nullptr;
  ibv_gid gid{};
  uint8_t gid_index = 0;
  uint64_t id = 0;  // of crux_transport.h
  // Slots for what is sent, for what a send leaves at the peer, and for what a write leaves there.
  std::vector<uint32_t> words = std::vector<uint32_t>(3 * kWindow * kWords);

  uint32_t* slot(size_t kind, uint32_t number) {
    return words.data() + (kind * kWindow + number % kWindow) * kWords;
  }
};

// One direction: what the sending and the receiving end have seen of it.
struct Direction {
  End& from;
  End& to;
  uint32_t sent = 0;
  uint32_t reported = 0;  // sends that are known to be done
  std::atomic<uint32_t> received{0};
  uint32_t misplaced = 0, altered = 0, failed = 0;
};

End open_end(const char* device, const char* gid_index) {
  End end;
  int count = 0;
  ibv_device** const devices = ibv_get_device_list(&count);
  if (devices == nullptr) refuse("no devices");
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(ibv_get_device_name(devices[i]), device) == 0)
      end.context = ibv_open_device(devices[i]);
  }
  ibv_free_device_list(devices);
  if (end.context == nullptr) refuse(std::string("can't open ") + device);
  end.gid_index = static_cast<uint8_t>(std::atoi(gid_index));
  if (ibv_query_gid(end.context, kPort, end.gid_index, &end.gid) != 0) refuse("no such GID");
  end.pd = ibv_alloc_pd(end.context);
  end.mr = ibv_reg_mr(end.pd, end.words.data(), end.words.size() * sizeof(uint32_t),
                      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  end.send_cq = ibv_create_cq(end.context, 2 * kWindow, nullptr, nullptr, 0);
  end.recv_cq = ibv_create_cq(end.context, 2 * kWindow, nullptr, nullptr, 0);
  if (!end.mr || !end.send_cq || !end.recv_cq) refuse("no memory region or completion queue");
  ibv_qp_init_attr wanted{};
  wanted.send_cq = end.send_cq;
  wanted.recv_cq = end.recv_cq;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = 2 * kWindow;
  wanted.cap.max_recv_wr = kWindow;
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  end.qp = ibv_create_qp(end.pd, &wanted);
  if (end.qp == nullptr) refuse("no queue pair");
  return end;
}

void modify(const End& end, ibv_qp_attr attributes, int mask) {
  if (const int error = ibv_modify_qp(end.qp, &attributes, mask))
    refuse("ibv_modify_qp to state " + std::to_string(attributes.qp_state) + ": " +
           std::strerror(error));
}

void connect(const End& end, const End& peer, uint32_t send_psn, uint32_t receive_psn) {
  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = kPort;
  init.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  modify(end, init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  ibv_qp_attr receive{};
  receive.qp_state = IBV_QPS_RTR;
  receive.path_mtu = IBV_MTU_4096;
  receive.dest_qp_num = peer.qp->qp_num;
  receive.rq_psn = receive_psn;
  receive.max_dest_rd_atomic = 1;
  receive.min_rnr_timer = 12;
  receive.ah_attr.is_global = 1;
  receive.ah_attr.port_num = kPort;
  receive.ah_attr.grh.dgid = peer.gid;
  receive.ah_attr.grh.sgid_index = end.gid_index;
  receive.ah_attr.grh.hop_limit = 64;
  modify(end, receive,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  ibv_qp_attr send{};
  send.qp_state = IBV_QPS_RTS;
  send.sq_psn = send_psn;
  send.timeout = 17;
  send.retry_cnt = send.rnr_retry = 7;
  send.max_rd_atomic = 1;
  modify(end, send,
         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
             IBV_QP_MAX_QP_RD_ATOMIC);
}

void close_end(End& end) {
  if (ibv_destroy_qp(end.qp) != 0 || ibv_destroy_cq(end.send_cq) != 0 ||
      ibv_destroy_cq(end.recv_cq) != 0 || ibv_dereg_mr(end.mr) != 0 ||
      ibv_dealloc_pd(end.pd) != 0 || ibv_close_device(end.context) != 0)
    refuse("something is still in use");
}

uint32_t word(uint32_t number, size_t i) { return number * 2654435761u + static_cast<uint32_t>(i); }

bool post_receive(End& end, uint32_t number) {
  ibv_sge taken{reinterpret_cast<uint64_t>(end.slot(1, number)), kBytes, end.mr->lkey};
  ibv_recv_wr receive{};
  receive.wr_id = number % kWindow;
  receive.sg_list = &taken;
  receive.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(end.qp, &receive, &bad) == 0;
}

// False where the send queue is full, which a held one is after a while.
bool post_next(Direction& way) {
  const uint32_t number = way.sent;
  uint32_t* const words = way.from.slot(0, number);
  for (size_t i = 0; i < kWords; ++i) words[i] = word(number, i);
  ibv_sge given{reinterpret_cast<uint64_t>(words), kBytes, way.from.mr->lkey};
  ibv_send_wr request{};
  request.wr_id = number;
  request.sg_list = &given;
  request.num_sge = 1;
  request.imm_data = number;
  // Sends and writes in turn: the one takes the slot of a receive, the other none.
  request.opcode = number % 2 == 0 ? IBV_WR_SEND_WITH_IMM : IBV_WR_RDMA_WRITE_WITH_IMM;
  request.wr.rdma.remote_addr = reinterpret_cast<uint64_t>(way.to.slot(2, number));
  request.wr.rdma.rkey = way.to.mr->rkey;
  request.send_flags = number % kSignalEvery == kSignalEvery - 1 ? IBV_SEND_SIGNALED : 0;
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(way.from.qp, &request, &bad);
  if (error == ENOMEM) return false;
  if (error != 0) refuse(std::string("ibv_post_send: ") + std::strerror(error));
  ++way.sent;
  return true;
}

void take_sends(Direction& way) {
  std::array<ibv_wc, 8> found{};
  const int count = ibv_poll_cq(way.from.send_cq, found.size(), found.data());
  for (int i = 0; i < count; ++i) {
    if (found[i].status != IBV_WC_SUCCESS) {
      ++way.failed;
    } else {
      way.reported = static_cast<uint32_t>(found[i].wr_id) + 1;
    }
  }
}

void take_receives(Direction& way) {
  std::array<ibv_wc, 8> found{};
  const int count = ibv_poll_cq(way.to.recv_cq, found.size(), found.data());
  for (int i = 0; i < count; ++i) {
    if (found[i].status != IBV_WC_SUCCESS) {
      ++way.failed;
      continue;
    }
    const uint32_t number = way.received;
    way.misplaced += found[i].imm_data != number;
    const uint32_t* const words = number % 2 == 0
                                      ? way.to.slot(1, static_cast<uint32_t>(found[i].wr_id))
                                      : way.to.slot(2, number);
    bool same = true;
    for (size_t w = 0; w < kWords; ++w) same &= words[w] == word(number, w);
    way.altered += !same;
    if (!post_receive(way.to, static_cast<uint32_t>(found[i].wr_id))) refuse("ibv_post_recv");
    way.received = number + 1;
  }
}

// Keeps both directions full until it is told to stop; then until everything has arrived.
void move_messages(std::array<Direction, 2>& ways, const std::atomic<bool>& stop) {
  Clock::time_point deadline = Clock::time_point::max();
  for (;;) {
    bool is_whole = true;
    for (Direction& way : ways) {
      // The last message is one that is reported, so that all are known to be done.
      const bool wants = !stop || way.sent % kSignalEvery != 0;
      if (wants && way.sent - way.reported < kWindow && way.sent - way.received < kWindow)
        post_next(way);
      take_sends(way);
      take_receives(way);
      is_whole &= !wants && way.received == way.sent && way.reported == way.sent;
    }
    if (stop && deadline == Clock::time_point::max()) deadline = Clock::now() + kPatience;
    const bool has_failed = ways[0].failed + ways[1].failed > 0;
    if (stop && (is_whole || has_failed || Clock::now() > deadline)) return;
  }
}

std::vector<uint32_t> ports_of(const char* text) {
  std::vector<uint32_t> ports;
  std::istringstream words(text);
  for (std::string port; std::getline(words, port, ',');)
    ports.push_back(static_cast<uint32_t>(std::stoul(port)));
  if (ports.empty()) refuse("no ports");
  return ports;
}

uint64_t id_of(const ibv_qp* qp, const char* device) {
  std::vector<crux_connection> found(64);
  found.resize(
      std::min(FIND(crux_transport_connections)(found.data(), found.size()), found.size()));
  for (const crux_connection& one : found) {
    if (one.kind == CRUX_QP && one.qpn == qp->qp_num && std::strcmp(one.device, device) == 0)
      return one.id;
  }
  refuse("the transport library does not list the queue pair");
}

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void await(const Direction& way, uint32_t messages) {
  const uint32_t before = way.received;
  const Clock::time_point deadline = Clock::now() + kPatience;
  while (way.received - before < messages) {
    if (Clock::now() > deadline) refuse("messages arrive no more");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void change_once(int number, Direction& way, uint32_t port, int dscp) {
  static auto* const hold = FIND(crux_transport_hold);
  static auto* const release = FIND(crux_transport_release);
  static auto* const change = FIND(crux_transport_change_queue_pair);
  const Clock::time_point start = Clock::now();
  // Nobody may send to a queue pair that is reset.
  const int held = hold(way.to.id, kTimeoutMs, kTimeoutMs);
  crux_queue_pair_outcome outcome{};
  if (held == 0) {
    const crux_queue_pair_change wanted{dscp, port, UINT64_MAX, kTimeoutMs};
    change(way.from.id, &wanted, &outcome);
    if (const int error = release(way.to.id); error != 0 && error != EINVAL)
      refuse(std::string("the peer stays held: ") + std::strerror(error));
  }
  const double took_ms = ms_since(start);
  std::printf(
      "{\"change\": %d, \"qpn\": %u, \"port\": %u, \"dscp\": %d, \"held\": %d, \"how\": %d, "
      "\"error\": %d, \"applied\": %s, \"took_ms\": %.3f, \"reason\": \"%s\"}\n",
      number, way.from.qp->qp_num, port, dscp, held, outcome.how, outcome.error,
      outcome.applied ? "true" : "false", took_ms, outcome.reason);
  // What was just set has to be seen on the wire before the next; a window of messages may have
  // arrived and not been counted.
  await(way, kWindow + kBetweenChanges);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 8) refuse("usage: live_change DEVICE GID DEVICE GID CHANGES PORTS PORTS");
  if (FIND(crux_transport_follow_queue_pairs)(1) != 0) refuse("queue pairs can't be followed");
  const int changes = std::atoi(arguments[5]);
  const std::array<std::vector<uint32_t>, 2> ports{ports_of(arguments[6]), ports_of(arguments[7])};
  End a = open_end(arguments[1], arguments[2]);
  End b = open_end(arguments[3], arguments[4]);
  // Packet numbers that pass their greatest value on the way.
  connect(a, b, 0xfffff0, 0xffff00);
  connect(b, a, 0xffff00, 0xfffff0);
  a.id = id_of(a.qp, arguments[1]);
  b.id = id_of(b.qp, arguments[3]);
  for (const End* end : {&a, &b}) {
    if (FIND(crux_transport_allow_reset)(end->id, nullptr, 1) != 0)
      refuse("a reset is not allowed");
  }
  for (uint32_t i = 0; i < kWindow; ++i) {
    if (!post_receive(a, i) || !post_receive(b, i)) refuse("ibv_post_recv");
  }
  std::array<Direction, 2> ways{Direction{a, b}, Direction{b, a}};
  std::atomic<bool> stop{false};
  std::thread mover([&] { move_messages(ways, stop); });
  // The setting of the connection is to be seen on the wire, too.
  for (const Direction& way : ways) await(way, 1);
  for (int i = 0; i < changes; ++i) {
    const std::vector<uint32_t>& choice = ports[i % 2];
    const int turn = i / 2;
    change_once(i, ways[i % 2], choice[turn % choice.size()], 1 + turn % 63);
  }
  stop = true;
  mover.join();
  bool is_whole = true;
  for (const Direction& way : ways) {
    std::printf(
        "{\"from\": %u, \"sent\": %u, \"received\": %u, \"misplaced\": %u, \"altered\": %u, "
        "\"failed\": %u}\n",
        way.from.qp->qp_num, way.sent, way.received.load(), way.misplaced, way.altered, way.failed);
    is_whole &= way.received == way.sent && way.misplaced + way.altered + way.failed == 0;
  }
  close_end(a);
  close_end(b);
  return is_whole ? 0 : 1;
}
