// Queue pairs over a device in memory: how they are connected, and that a change of one in use
// loses nothing, whatever fails in the middle of it.
#include <arpa/inet.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/transport/crux_transport.h"
#include "../../csrc/transport/verbs/fault.h"
#include "../../csrc/transport/verbs/flow_label.h"
#include "check.h"
#include "fake_ibverbs.h"

namespace {

using namespace std::chrono_literals;
using crux::transport::verbs::faults;

const crux_verbs_hooks& hooks() {
  static const crux_verbs_hooks* const found = crux_transport_attach_standin(CRUX_STANDIN_ABI);
  return *found;
}

constexpr uint32_t kDepth = 32;
constexpr int kSlots = 64, kBytes = 48;

// One end, with buffers.
struct End {
  explicit End(int index, bool with_channel = false) : index(index) {
    context = hooks().open_device(&fake_verbs::calls(), fake_verbs::device(index));
    pd.context = context;
    cq = hooks().create_cq(&fake_verbs::calls(), context, 2 * kDepth, nullptr,
                           with_channel ? &channel : nullptr, 0);
    ibv_qp_init_attr given{};
    given.send_cq = given.recv_cq = cq;
    given.qp_type = IBV_QPT_RC;
    given.cap = {kDepth, kDepth, 2, 2, kBytes};
    qp = hooks().create_qp(&fake_verbs::calls(), &pd, &given);
    sends.resize(kSlots * kBytes);
    receives.resize(kSlots * kBytes);
    written.resize(kSlots * kBytes);
  }
  ~End() {
    destroy();
    CHECK(hooks().destroy_cq(&fake_verbs::calls(), cq) == 0);
    CHECK(hooks().close_device(&fake_verbs::calls(), context) == 0);
  }
  void destroy() {
    if (qp != nullptr) CHECK(hooks().destroy_qp(&fake_verbs::calls(), qp) == 0);
    qp = nullptr;
  }

  int modify(ibv_qp_attr& attributes, int mask) {
    return hooks().modify_qp(&fake_verbs::calls(), qp, &attributes, mask);
  }
  int to(ibv_qp_state state) {
    ibv_qp_attr attributes{};
    attributes.qp_state = state;
    return modify(attributes, IBV_QP_STATE);
  }

  int send(uint64_t wr_id, int flags, int slot = 0, ibv_wr_opcode opcode = IBV_WR_SEND_WITH_IMM,
           const End* peer = nullptr) {
    ibv_sge piece{reinterpret_cast<uintptr_t>(&sends[slot * kBytes]), kBytes, 0};
    ibv_send_wr request{}, *refused = nullptr;
    request.wr_id = wr_id;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.opcode = opcode;
    request.send_flags = flags;
    request.imm_data = htonl(static_cast<uint32_t>(wr_id));
    if (peer != nullptr)
      request.wr.rdma.remote_addr = reinterpret_cast<uintptr_t>(&peer->written[slot * kBytes]);
    const int error = ibv_post_send(qp, &request, &refused);
    CHECK(error == 0 || refused == &request);
    return error;
  }
  int receive(int slot) {
    ibv_sge piece{reinterpret_cast<uintptr_t>(&receives[slot * kBytes]), kBytes, 0};
    ibv_recv_wr request{}, *refused = nullptr;
    request.wr_id = 5000 + slot;
    request.sg_list = &piece;
    request.num_sge = 1;
    return ibv_post_recv(qp, &request, &refused);
  }
  std::vector<ibv_wc> poll() {
    std::vector<ibv_wc> got(16);
    const int count = ibv_poll_cq(cq, 16, got.data());
    CHECK(count >= 0);
    got.resize(count);
    return got;
  }

  crux_connection described() const {
    std::vector<crux_connection> all(64);
    all.resize(crux_transport_connections(all.data(), all.size()));
    for (const crux_connection& one : all) {
      if (one.kind == CRUX_QP && one.qpn == qp->qp_num) return one;
    }
    CHECK(false);
    return {};
  }
  uint64_t id() const { return described().id; }

  const int index;
  ibv_context* context;
  ibv_pd pd{};
  ibv_comp_channel channel{};
  ibv_cq* cq;
  ibv_qp* qp;
  std::vector<uint8_t> sends, receives, written;
};

int connect_one(End& from, const End& to, uint8_t traffic_class = 0) {
  ibv_qp_attr init{}, rtr{}, rts{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = 1;
  CHECK(from.modify(init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ==
        0);
  rtr.qp_state = IBV_QPS_RTR;
  rtr.dest_qp_num = to.qp->qp_num;
  rtr.rq_psn = 100 + to.index;
  rtr.ah_attr.is_global = 1;
  rtr.ah_attr.port_num = 1;
  rtr.ah_attr.grh.sgid_index = 1;
  rtr.ah_attr.grh.traffic_class = traffic_class;
  fake_verbs::calls().query_gid(to.context, 1, 1, &rtr.ah_attr.grh.dgid);
  const int error =
      from.modify(rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) return error;
  rts.qp_state = IBV_QPS_RTS;
  rts.sq_psn = 100 + from.index;
  return from.modify(rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                              IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

struct Pair {
  explicit Pair(uint8_t traffic_class = 0) : a(0), b(1) {
    CHECK(connect_one(a, b, traffic_class) == 0 && connect_one(b, a, traffic_class) == 0);
  }
  End a, b;
};

crux_queue_pair_outcome change(uint64_t id, int dscp, uint32_t port, uint32_t timeout_ms = 500) {
  const crux_queue_pair_change wanted{dscp, port, UINT64_MAX, timeout_ms};
  crux_queue_pair_outcome outcome{};
  const int error = crux_transport_change_queue_pair(id, &wanted, &outcome);
  CHECK(error == outcome.error);
  return outcome;
}

void set_route(const char* destination, int dscp, std::vector<uint16_t> ports) {
  crux_route route{};
  std::strcpy(route.destination, destination);
  route.dscp = dscp;
  route.port_count = static_cast<uint32_t>(ports.size());
  std::copy(ports.begin(), ports.end(), route.ports);
  CHECK(crux_transport_set_routes(&route, 1) == 0);
}

// Until nothing moves.
void run_dry() {
  while (fake_verbs::pump() > 0) {
  }
}

void the_nth_takes_the_nth_port() {
  set_route("10.9.0.2", 26, {50001, 50002, 40000, 50003});
  End peer(1);
  std::vector<std::unique_ptr<End>> ends;
  for (int i = 0; i < 5; ++i) {
    ends.push_back(std::make_unique<End>(0));
    CHECK(connect_one(*ends.back(), peer, 2) == 0);
  }
  const uint16_t expected[] = {50001, 50002, 50003, 50001, 50002};
  for (int i = 0; i < 5; ++i) {
    const crux_connection seen = ends[i]->described();
    CHECK(seen.local_port == expected[i] && seen.peer_port == 4791);
    CHECK(seen.how == CRUX_AT_RTR && seen.error == 0 && seen.dscp == 26);
    CHECK(std::string(seen.peer) == "10.9.0.2" && std::string(seen.local) == "10.9.0.1");
    CHECK(std::string(seen.device) == "fake0" && seen.peer_qpn == peer.qp->qp_num);
    CHECK(seen.state == IBV_QPS_RTS);
  }
  ends.erase(ends.begin() + 1);
  ends.push_back(std::make_unique<End>(0));
  CHECK(connect_one(*ends.back(), peer) == 0);
  CHECK(ends.back()->described().local_port == 50002);  // the least used, first of the list
  CHECK(crux_transport_set_routes(nullptr, 0) == 0);
  End other(0);
  CHECK(connect_one(other, peer, 9) == 0);
  CHECK(other.described().how == CRUX_UNTOUCHED && other.described().dscp == 2);
  CHECK(other.described().local_port == 0);
}

void labels_name_owner_and_class() {
  CHECK(crux_transport_label(0, "x", 1) == EINVAL && crux_transport_label(256, "x", 1) == EINVAL);
  CHECK(crux_transport_label(5, "", 1) == EINVAL && crux_transport_label(5, "x", 64) == EINVAL);
  CHECK(crux_transport_label(0x2e, "job/dp", 40) == 0);
  CHECK(crux_transport_label(0x32, "job/tp", -1) == 0);
  set_route("10.9.0.2", 10, {});
  Pair labelled(0x2e), kept(0x32), plain;
  CHECK(std::string(labelled.a.described().owner) == "job/dp");
  CHECK(labelled.a.described().dscp == 40 && labelled.b.described().dscp == 40);
  CHECK(std::string(kept.a.described().owner) == "job/tp" && kept.b.described().dscp == 0x32 >> 2);
  CHECK(plain.a.described().dscp == 10 && plain.b.described().dscp == 0);
  CHECK(std::string(plain.a.described().owner).empty());
  labelled.b.receive(0);
  CHECK(labelled.a.send(1, IBV_SEND_SIGNALED) == 0);
  run_dry();
  // The label's ECN bits stay.
  CHECK(fake_verbs::wire(labelled.a.qp->qp_num).traffic_class == (40 << 2 | 2));
  CHECK(crux_transport_set_routes(nullptr, 0) == 0);
}

void a_refusal_gives_what_was_asked() {
  set_route("10.9.0.2", 26, {50001});
  fake_verbs::refuse_flow_labels(true);
  Pair pair;
  fake_verbs::refuse_flow_labels(false);
  CHECK(pair.a.described().how == CRUX_REFUSED && pair.a.described().error == EINVAL);
  CHECK(pair.a.described().dscp == 0 && pair.a.described().local_port == 0);
  CHECK(crux_transport_set_routes(nullptr, 0) == 0);
}

void nothing_is_reset_unasked() {
  CHECK(crux_transport_follow_queue_pairs(0) == 0);
  {
    Pair pair;
    CHECK(pair.a.context->ops.post_send == pair.b.context->ops.post_send);
    const auto outcome = change(pair.a.id(), 8, 50001);
    CHECK(outcome.how == CRUX_NEEDS_SWITCH && outcome.error == EPERM && !outcome.applied);
    CHECK(crux_transport_allow_reset(pair.a.id(), nullptr, 1) == 0);
    CHECK(change(pair.a.id(), 8, 50001).error == EOPNOTSUPP);
    CHECK(pair.a.described().how == CRUX_NEEDS_SWITCH);
    CHECK(crux_transport_hold(pair.a.id(), 10, 10) == EOPNOTSUPP);
  }
  CHECK(crux_transport_follow_queue_pairs(1) == 0);
  End with_channel(0, true), peer(1);
  CHECK(connect_one(with_channel, peer) == 0);
  CHECK(crux_transport_allow_reset(with_channel.id(), nullptr, 1) == 0);
  const auto outcome = change(with_channel.id(), 8, 0);
  CHECK(outcome.how == CRUX_NEEDS_SWITCH && std::strstr(outcome.reason, "channel") != nullptr);
  CHECK(change(999999, 8, 0).error == ENOENT);
  CHECK(change(with_channel.id(), 8, 40000).error == EINVAL);
  CHECK(crux_transport_allow_reset(0, nullptr, 1) == EINVAL);
  CHECK(crux_transport_allow_reset(999999, nullptr, 1) == ENOENT);
}

// Messages both ways, each with its number, in three kinds, one in four signaled.
class Traffic {
 public:
  Traffic(End& end, const End& peer) : end_(end), peer_(peer) {
    for (int i = 0; i < static_cast<int>(kDepth); ++i) CHECK(end.receive(i) == 0);
    thread_ = std::thread([this] { run(); });
  }
  ~Traffic() {
    if (thread_.joinable()) finish();
  }
  uint64_t received() const { return received_; }
  uint64_t sent() const { return sent_; }
  void stop_sending() { sending_ = false; }
  bool is_idle() const { return !sending_ && sent_ == done_; }
  void finish() {
    running_ = false;
    thread_.join();
  }

 private:
  static constexpr uint64_t kRow = 4;

  void fill(uint8_t* at, uint64_t number) {
    for (int i = 0; i < kBytes; ++i) at[i] = static_cast<uint8_t>(number * 31 + i);
  }
  void run() {
    while (running_) {
      for (const ibv_wc& completion : end_.poll()) take(completion);
      // A row at a time: what is left at the end is signaled.
      while (sending_ && sent_ - done_ + kRow <= kDepth) {
        for (uint64_t i = 0; i < kRow; ++i) post(i == kRow - 1);
      }
      if (sent_ - done_ + kRow > kDepth) std::this_thread::yield();
    }
  }
  void post(bool signaled) {
    const uint64_t number = sent_;
    const int slot = static_cast<int>(number % kSlots);
    fill(&end_.sends[slot * kBytes], number);
    int flags = signaled ? IBV_SEND_SIGNALED : 0;
    const auto opcode = number % 3 == 0 ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM;
    if (number % 3 == 1) flags |= IBV_SEND_INLINE;
    CHECK(end_.send(number, flags, slot, opcode, &peer_) == 0);
    // Sent inline, the buffer is the caller's again at once.
    if (number % 3 == 1) std::memset(&end_.sends[slot * kBytes], 0xee, kBytes);
    ++sent_;
  }
  void take(const ibv_wc& completion) {
    if (completion.status != IBV_WC_SUCCESS) {
      std::fprintf(stderr, "status %d of request %llu\n", completion.status,
                   static_cast<unsigned long long>(completion.wr_id));
    }
    CHECK(completion.status == IBV_WC_SUCCESS);
    if (!(completion.opcode & IBV_WC_RECV)) {
      CHECK(completion.wr_id == done_ + kRow - 1);
      done_ += kRow;
      return;
    }
    const uint64_t number = received_;
    CHECK(ntohl(completion.imm_data) == number);
    const int slot = static_cast<int>(completion.wr_id) - 5000;
    CHECK(slot == static_cast<int>(number % kDepth));
    uint8_t expected[kBytes];
    fill(expected, number);
    const uint8_t* const got =
        number % 3 == 0 ? &end_.written[number % kSlots * kBytes] : &end_.receives[slot * kBytes];
    CHECK(std::memcmp(got, expected, kBytes) == 0);
    CHECK(end_.receive(slot) == 0);
    ++received_;
  }

  End& end_;
  const End& peer_;
  std::atomic<bool> running_{true}, sending_{true};
  std::atomic<uint64_t> sent_{0}, done_{0}, received_{0};
  std::thread thread_;
};

template <typename Condition>
bool within(std::chrono::milliseconds limit, Condition condition) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

// Moves both ends of a loaded pair back and forth, `rounds` times, while `faults` strike.
void moves_under_load(int rounds, const char* fault, int least_applied, int least_failed) {
  Pair pair;
  const uint64_t ids[] = {pair.a.id(), pair.b.id()};
  for (const uint64_t id : ids) CHECK(crux_transport_allow_reset(id, nullptr, 1) == 0);
  int applied = 0, failed = 0;
  {
    fake_verbs::start();
    Traffic from_a(pair.a, pair.b), from_b(pair.b, pair.a);
    CHECK(faults().set(fault));
    for (int round = 0; round < rounds; ++round) {
      const uint64_t before_a = from_a.received(), before_b = from_b.received();
      bool held = true;
      for (const uint64_t id : ids) {
        const int error = crux_transport_hold(id, 5000, 5000);
        CHECK(error == 0 || error == ETIMEDOUT);
        if (error != 0) held = false;
      }
      for (End* end : {&pair.a, &pair.b}) {
        if (!held) {
          ++failed;
          continue;
        }
        const crux_connection old = end->described();
        const int dscp = round % 60 + 1;
        const uint32_t port = 49152 + round % 1000;
        const auto outcome = change(old.id, dscp, port);
        const crux_connection now = end->described();
        CHECK(now.state == IBV_QPS_RTS);
        CHECK(outcome.applied == (outcome.error == 0));
        if (outcome.applied) {
          CHECK(outcome.how == CRUX_LIVE_RESET && now.how == CRUX_LIVE_RESET);
          CHECK(now.dscp == dscp && now.local_port == port);
          ++applied;
        } else {
          CHECK(*outcome.reason != '\0' && now.error == outcome.error);
          CHECK(now.dscp == old.dscp && now.local_port == old.local_port);
          ++failed;
        }
      }
      for (const uint64_t id : ids) {
        const int error = crux_transport_release(id);
        CHECK(error == 0 || (error == EINVAL && !held));
      }
      // It goes on after each change.
      // By more than what was on its way before.
      CHECK(within(5000ms, [&] {
        return from_a.received() > before_a + kDepth && from_b.received() > before_b + kDepth;
      }));
    }
    CHECK(faults().set(""));
    from_a.stop_sending();
    from_b.stop_sending();
    CHECK(within(5000ms, [&] {
      return from_a.is_idle() && from_b.is_idle() && from_a.received() == from_b.sent() &&
             from_b.received() == from_a.sent();
    }));
    from_a.finish();
    from_b.finish();
    fake_verbs::stop();
  }
  for (const End* end : {&pair.a, &pair.b}) {
    const fake_verbs::Wire wire = fake_verbs::wire(end->qp->qp_num);
    CHECK(wire.udp_port == end->described().local_port);
    CHECK(wire.traffic_class >> 2 == end->described().dscp);
  }
  CHECK(fake_verbs::overruns() == 0);
  CHECK(applied >= least_applied && failed >= least_failed);
}

void what_is_held_is_bounded_and_copied() {
  Pair pair;
  const uint64_t id = pair.a.id();
  for (int i = 0; i < static_cast<int>(kDepth); ++i) CHECK(pair.b.receive(i) == 0);
  CHECK(crux_transport_hold(id, 100, 60000) == 0);
  CHECK(crux_transport_hold(id, 100, 60000) == 0);
  for (uint64_t i = 0; i < kDepth; ++i) {
    pair.a.sends[0] = static_cast<uint8_t>(i);
    CHECK(pair.a.send(i, IBV_SEND_SIGNALED | IBV_SEND_INLINE) == 0);
  }
  CHECK(pair.a.send(77, IBV_SEND_SIGNALED) == ENOMEM);
  ibv_sge many[3]{};
  ibv_send_wr wide{}, *refused = nullptr;
  wide.sg_list = many;
  wide.num_sge = 3;
  run_dry();
  CHECK(pair.a.poll().empty() && fake_verbs::wire(pair.a.qp->qp_num).messages == 0);
  CHECK(crux_transport_release(id) == 0 && crux_transport_release(id) == EINVAL);
  CHECK(ibv_post_send(pair.a.qp, &wide, &refused) != 0 && refused == &wide);
  run_dry();
  for (uint64_t i = 0; i < kDepth; ++i) {
    CHECK(pair.b.receives[i * kBytes] == i);
    CHECK(pair.b.receives[i * kBytes + 1] == pair.a.sends[1]);
  }
  uint64_t next = 0;
  while (next < kDepth) {
    for (const ibv_wc& completion : pair.a.poll()) CHECK(completion.wr_id == next++);
  }
  CHECK(pair.a.poll().empty());
}

void a_hold_ends_by_itself() {
  Pair pair;
  CHECK(pair.b.receive(0) == 0);
  CHECK(crux_transport_hold(pair.a.id(), 20, 20) == 0);
  CHECK(pair.a.send(1, IBV_SEND_SIGNALED) == 0);
  // Nothing but the program's own polling is needed.
  CHECK(within(5000ms, [&] {
    run_dry();
    return pair.a.poll().size() == 1;
  }));
  CHECK(crux_transport_release(pair.a.id()) == EINVAL);
}

void what_does_not_end_is_left_as_it_is() {
  Pair pair;
  const uint64_t id = pair.a.id();
  CHECK(crux_transport_allow_reset(id, nullptr, 1) == 0);
  CHECK(pair.a.send(1, IBV_SEND_SIGNALED) == 0);  // its peer has no receive
  const auto outcome = change(id, 8, 50001, 30);
  CHECK(outcome.error == ETIMEDOUT && !outcome.applied && outcome.how == CRUX_UNTOUCHED);
  CHECK(pair.b.receive(0) == 0);
  CHECK(pair.a.send(2, IBV_SEND_SIGNALED) == 0 && pair.b.receive(1) == 0);
  run_dry();
  CHECK(pair.a.poll().size() == 2 && pair.b.poll().size() == 2);
}

void an_unsignaled_end_gets_a_marker_where_the_peer_takes_writes() {
  for (const bool writes : {false, true}) {
    Pair pair;
    const uint64_t id = pair.a.id();
    CHECK(crux_transport_allow_reset(id, nullptr, 1) == 0);
    for (int i = 0; i < 8; ++i) CHECK(pair.b.receive(i) == 0);
    if (writes) {
      CHECK(pair.a.send(1, IBV_SEND_SIGNALED, 0, IBV_WR_RDMA_WRITE, &pair.b) == 0);
      run_dry();
      CHECK(pair.a.poll().size() == 1);
    }
    fake_verbs::start();
    CHECK(pair.a.send(2, 0) == 0);
    const auto outcome = change(id, 8, 50001, writes ? 5000 : 60);
    CHECK(outcome.error == (writes ? 0 : ETIMEDOUT));
    // Behind a signaled one nothing more is needed.
    CHECK(pair.a.send(3, IBV_SEND_SIGNALED) == 0);
    CHECK(change(id, 9, 50002, 5000).error == 0);
    fake_verbs::stop();
    const auto seen = pair.a.poll();
    CHECK(seen.size() == 1 && seen[0].wr_id == 3);
  }
}

void while_it_drains_a_row_is_let_through_to_its_signaled_end() {
  Pair pair;
  const uint64_t id = pair.a.id();
  for (int i = 0; i < 8; ++i) CHECK(pair.b.receive(i) == 0);
  CHECK(pair.a.send(1, 0) == 0);
  std::atomic<int> result{-1};
  std::thread holding([&] { result = crux_transport_hold(id, 5000, 60000); });
  std::this_thread::sleep_for(20ms);
  CHECK(pair.a.send(2, IBV_SEND_SIGNALED) == 0);
  CHECK(within(5000ms, [&] {
    run_dry();
    return result == 0;
  }));
  holding.join();
  CHECK(pair.a.send(3, IBV_SEND_SIGNALED) == 0);
  run_dry();
  CHECK(fake_verbs::wire(pair.a.qp->qp_num).messages == 2);
  CHECK(crux_transport_release(id) == 0);
  run_dry();
  CHECK(fake_verbs::wire(pair.a.qp->qp_num).messages == 3);
}

void what_was_completed_and_not_polled_is_kept() {
  Pair pair;
  const uint64_t id = pair.b.id();
  CHECK(crux_transport_allow_reset(id, nullptr, 1) == 0);
  for (int i = 0; i < 5; ++i) CHECK(pair.b.receive(i) == 0);
  for (uint64_t i = 0; i < 3; ++i)
    CHECK(pair.a.send(i, IBV_SEND_SIGNALED, static_cast<int>(i)) == 0);
  run_dry();
  CHECK(change(id, 8, 50001).error == 0);
  for (uint64_t i = 3; i < 5; ++i)
    CHECK(pair.a.send(i, IBV_SEND_SIGNALED, static_cast<int>(i)) == 0);
  run_dry();
  const auto seen = pair.b.poll();
  CHECK(seen.size() == 5);
  for (int i = 0; i < 5; ++i) CHECK(seen[i].wr_id == 5000u + i);
}

void a_sending_peer_is_noticed() {
  Pair pair;
  const uint64_t id = pair.b.id();
  CHECK(crux_transport_allow_reset(id, nullptr, 1) == 0);
  for (int i = 0; i < static_cast<int>(kDepth); ++i) CHECK(pair.b.receive(i) == 0);
  uint64_t sent = 0;
  fake_verbs::on_query([&] {
    CHECK(pair.a.send(sent++, IBV_SEND_SIGNALED) == 0);
    run_dry();
  });
  const auto outcome = change(id, 8, 50001);
  fake_verbs::on_query(nullptr);
  CHECK(outcome.error == EBUSY && outcome.how == CRUX_UNTOUCHED && !outcome.applied);
  // What came meanwhile was kept, in its order.
  uint64_t next = 0;
  while (next < sent) {
    const auto seen = pair.b.poll();
    CHECK(!seen.empty());
    for (const ibv_wc& completion : seen) CHECK(ntohl(completion.imm_data) == next++);
  }
  CHECK(change(id, 8, 50001).error == 0);
}

void a_device_that_refuses_everything_reports_what_was_waiting() {
  Pair pair;
  const uint64_t id = pair.a.id();
  CHECK(crux_transport_allow_reset(id, nullptr, 1) == 0);
  for (int i = 0; i < 4; ++i) CHECK(pair.a.receive(i) == 0);
  CHECK(crux_transport_hold(id, 100, 60000) == 0);
  CHECK(pair.a.send(9, IBV_SEND_SIGNALED) == 0);
  fake_verbs::fail_modify(IBV_QPS_RTR, 1);
  const auto outcome = change(id, 8, 50001);
  fake_verbs::fail_modify(IBV_QPS_RTR, 0);
  CHECK(outcome.how == CRUX_REFUSED && outcome.error == EIO && !outcome.applied);
  int flushed = 0;
  for (const ibv_wc& completion : pair.a.poll()) {
    CHECK(completion.status == IBV_WC_WR_FLUSH_ERR && completion.qp_num == pair.a.qp->qp_num);
    ++flushed;
  }
  CHECK(flushed == 5);
  CHECK(change(id, 8, 50001).error != 0);
}

void the_programs_own_calls_go_first() {
  {
    Pair pair;  // ERR while it is held: what waits is flushed by the device
    CHECK(crux_transport_hold(pair.a.id(), 100, 60000) == 0);
    CHECK(pair.a.send(1, IBV_SEND_SIGNALED) == 0);
    CHECK(pair.a.to(IBV_QPS_ERR) == 0);
    const auto seen = pair.a.poll();
    CHECK(seen.size() == 1 && seen[0].status == IBV_WC_WR_FLUSH_ERR);
    CHECK(crux_transport_hold(pair.a.id(), 10, 10) == ENOTCONN);
    // And connected again it can be changed again.
    CHECK(pair.a.to(IBV_QPS_RESET) == 0 && pair.b.to(IBV_QPS_RESET) == 0);
    CHECK(connect_one(pair.a, pair.b) == 0 && connect_one(pair.b, pair.a) == 0);
    CHECK(crux_transport_allow_reset(pair.a.id(), nullptr, 1) == 0);
    CHECK(change(pair.a.id(), 8, 50001).error == 0);
  }
  Pair pair;  // destroyed while it drains
  CHECK(pair.a.send(1, IBV_SEND_SIGNALED) == 0);
  const uint64_t id = pair.a.id();
  std::thread holding([id] { CHECK(crux_transport_hold(id, 60000, 10) == ECANCELED); });
  std::this_thread::sleep_for(20ms);
  pair.a.destroy();
  holding.join();
  CHECK(crux_transport_release(id) == ENOENT);
}

void an_owner_may_allow_all_of_its_own() {
  CHECK(crux_transport_label(0x44, "group", -1) == 0);
  Pair pair(0x44), other;
  CHECK(crux_transport_allow_reset(0, "group", 1) == 0);
  CHECK(change(pair.a.id(), 3, 0).how == CRUX_LIVE_RESET);
  CHECK(change(other.a.id(), 3, 0).error == EPERM);
  CHECK(crux_transport_allow_reset(0, "group", 0) == 0);
  CHECK(change(pair.a.id(), 4, 0).error == EPERM);
  CHECK(change(pair.a.id(), 3, 0).error == 0);  // as it is already
}

void a_forked_child_has_none() {
  Pair pair;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) _exit(crux_transport_connections(nullptr, 0) == 0 ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void made_and_destroyed_by_many_threads() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 20; ++round) {
        Pair pair;
        CHECK(crux_transport_allow_reset(pair.a.id(), nullptr, 1) == 0);
        CHECK(change(pair.a.id(), round % 60 + 1, 50000 + round).error == 0);
        CHECK(pair.b.receive(0) == 0 && pair.a.send(1, IBV_SEND_SIGNALED) == 0);
        run_dry();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  CHECK(crux_transport_attach_standin(CRUX_STANDIN_ABI + 1) == nullptr);
  hooks();
  CHECK(crux_transport_sees_queue_pairs());
  the_nth_takes_the_nth_port();
  labels_name_owner_and_class();
  a_refusal_gives_what_was_asked();
  nothing_is_reset_unasked();
  what_is_held_is_bounded_and_copied();
  a_hold_ends_by_itself();
  what_does_not_end_is_left_as_it_is();
  an_unsignaled_end_gets_a_marker_where_the_peer_takes_writes();
  while_it_drains_a_row_is_let_through_to_its_signaled_end();
  what_was_completed_and_not_polled_is_kept();
  a_sending_peer_is_noticed();
  a_device_that_refuses_everything_reports_what_was_waiting();
  the_programs_own_calls_go_first();
  an_owner_may_allow_all_of_its_own();
  a_forked_child_has_none();
  moves_under_load(100, "", 200, 0);
  for (const char* fault : {"reset:3", "init:3", "repost:3", "rtr:3", "rts:3"})
    moves_under_load(20, fault, 20, 10);
  moves_under_load(20, "query:5", 15, 10);
  moves_under_load(20, "drain:5", 20, 4);
  moves_under_load(20, "reset:2,rtr:3,rts:5,repost:7", 3, 20);
  made_and_destroyed_by_many_threads();
  CHECK(fake_verbs::open_queue_pairs() == 0);
  return 0;
}
