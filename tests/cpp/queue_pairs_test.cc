// Queue pairs of a device in memory: how they are connected, listed, and destroyed.
#include "../../csrc/transport/verbs/queue_pairs.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/transport/crux_transport.h"
#include "../../csrc/transport/verbs/queue_pair.h"
#include "check.h"
#include "fake_ibverbs.h"
#include "rc_connect.h"

namespace {

const crux_verbs_hooks& hooks() {
  static const crux_verbs_hooks* const found = crux_transport_attach_standin(CRUX_STANDIN_ABI);
  return *found;
}

struct End {
  explicit End(int index) : context(fake_verbs::open_device(fake_verbs::device(index))) {
    pd.context = context;
    ibv_qp_init_attr given{};
    given.qp_type = IBV_QPT_RC;
    qp = hooks().create_qp(&fake_verbs::calls(), &pd, &given);
  }
  ~End() {
    destroy();
    CHECK(hooks().close_device(&fake_verbs::calls(), context) == 0);
  }
  void destroy() {
    if (qp != nullptr) CHECK(hooks().destroy_qp(&fake_verbs::calls(), qp) == 0);
    qp = nullptr;
  }
  int modify(ibv_qp_attr& attributes, int mask) {
    return hooks().modify_qp(&fake_verbs::calls(), qp, &attributes, mask);
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

  ibv_context* context;
  ibv_pd pd{};
  ibv_qp* qp;
};

int connect_one(End& from, const End& to, uint8_t traffic_class = 0, uint8_t service_level = 0) {
  ibv_gid peer;
  fake_verbs::calls().query_gid(to.context, 1, 1, &peer);
  return rc_connect(to.qp->qp_num, peer, traffic_class, [&](ibv_qp_attr& given, int mask) {
    given.ah_attr.sl = service_level;
    return from.modify(given, mask);
  });
}

struct Pair {
  explicit Pair(uint8_t traffic_class = 0) : a(0), b(1) {
    CHECK(connect_one(a, b, traffic_class) == 0 && connect_one(b, a, traffic_class) == 0);
  }
  End a, b;
};

// A route for as long as this exists.
struct Routed {
  Routed(const char* destination, int dscp, std::vector<uint16_t> ports, bool overrides = false) {
    crux_route route{};
    std::strcpy(route.destination, destination);
    route.dscp = 63;  // of sockets, which no queue pair may get
    route.qp_dscp = dscp;
    route.overrides = overrides ? 1 : 0;
    route.port_count = static_cast<uint32_t>(ports.size());
    std::copy(ports.begin(), ports.end(), route.ports);
    CHECK(crux_transport_set_routes(&route, 1) == 0);
  }
  ~Routed() { CHECK(crux_transport_set_routes(nullptr, 0) == 0); }
};

void the_nth_queue_pair_takes_the_nth_port() {
  End peer(1);
  std::vector<std::unique_ptr<End>> ends;
  {
    const Routed routed("10.9.0.2", 26, {50001, 50002, 40000, 50003});
    const uint16_t expected[] = {50001, 50002, 50003, 50001, 50002};
    for (const uint16_t port : expected) {
      ends.push_back(std::make_unique<End>(0));
      CHECK(connect_one(*ends.back(), peer, 2) == 0);
      const crux_connection seen = ends.back()->described();
      CHECK(seen.local_port == port && seen.peer_port == 4791);
      CHECK(seen.how == CRUX_AT_RTR && seen.error == 0 && seen.dscp == 26);
      CHECK(std::string(seen.peer) == "10.9.0.2" && std::string(seen.local) == "10.9.0.1");
      CHECK(std::string(seen.device) == "fake0" && seen.peer_qpn == peer.qp->qp_num);
      CHECK(seen.state == IBV_QPS_RTS);
    }
    ends.erase(ends.begin() + 1);
    ends.push_back(std::make_unique<End>(0));
    CHECK(connect_one(*ends.back(), peer) == 0);
    CHECK(ends.back()->described().local_port == 50002);  // the least used, first of the list
  }
  End other(0);
  CHECK(connect_one(other, peer, 9) == 0);
  CHECK(other.described().how == CRUX_UNTOUCHED && other.described().dscp == 2);
  CHECK(other.described().local_port == 0);
}

// As NCCL has it, which writes its class into both.
void the_service_level_follows_the_class() {
  End peer(1);
  const auto wire = [&peer](uint8_t traffic_class, uint8_t service_level) {
    End end(0);
    CHECK(connect_one(end, peer, traffic_class, service_level) == 0);
    return fake_verbs::wire(end.qp->qp_num);
  };
  CHECK(crux_transport_label(18, "group 1", 40) == 0);
  CHECK(wire(18, 18).traffic_class == 162 && wire(18, 18).service_level == 162);
  CHECK(wire(18, 3).traffic_class == 162 && wire(18, 3).service_level == 3);  // NCCL_IB_SL=3
  const Routed routed("10.9.0.2", 26, {}, true);
  CHECK(wire(106, 106).traffic_class == 106 && wire(98, 98).service_level == 106);
  CHECK(wire(0, 0).traffic_class == 104 && wire(0, 0).service_level == 0);  // it gave none
}

void a_class_that_the_program_chose_stays() {
  End peer(1);
  const auto wire = [&peer](uint8_t traffic_class) {
    End end(0);
    CHECK(connect_one(end, peer, traffic_class, traffic_class) == 0);
    return fake_verbs::wire(end.qp->qp_num);
  };
  CHECK(crux_transport_label(34, "group 2", 40) == 0);
  {
    const Routed routed("10.9.0.2", 26, {50001});
    CHECK(wire(98).traffic_class == 98 && wire(98).service_level == 98);
    CHECK(wire(98).udp_port == 50001);     // its path is planned all the same
    CHECK(wire(2).traffic_class == 106);   // ECN bits alone are no class
    CHECK(wire(34).traffic_class == 162);  // a label
  }
  {
    const Routed unmarked("10.9.0.2", -1, {50001}, true);
    for (const uint8_t asked : {0, 2, 98}) CHECK(wire(asked).traffic_class == asked);
  }
  const Routed routed("10.9.0.2", 26, {50001}, true);
  CHECK(wire(98).traffic_class == 106);
}

void a_refused_path_is_replaced_by_the_callers_own() {
  const Routed routed("10.9.0.2", 26, {50001});
  fake_verbs::refuse_flow_labels(EINVAL);
  Pair pair;
  fake_verbs::refuse_flow_labels(0);
  CHECK(pair.a.described().how == CRUX_REFUSED && pair.a.described().error == EINVAL);
  CHECK(pair.a.described().dscp == 0 && pair.a.described().local_port == 0);
}

// What a device with mlx5's calls does is tested in tests/apply/test_queue_pairs.py.
void a_device_without_a_call_for_it_is_not_changed() {
  Pair pair;
  End unconnected(0);
  crux_queue_pair_outcome outcome{};
  const auto change = [&outcome](const End& end, uint32_t port, uint64_t rate_Bps) {
    const int error =
        crux_transport_change_queue_pair(end.described().id, port, rate_Bps, &outcome);
    CHECK(error == outcome.error && outcome.how == end.described().how);
    CHECK((error == 0) == (*outcome.reason == '\0'));
    return error;
  };
  CHECK(change(pair.a, 40000, UINT64_MAX) == EINVAL && outcome.how == CRUX_UNTOUCHED);
  CHECK(change(pair.a, 0, 0) == 0 && outcome.how == CRUX_UNTOUCHED);
  CHECK(change(pair.a, 50001, UINT64_MAX) == EOPNOTSUPP && outcome.how == CRUX_NEEDS_HANDOVER);
  CHECK(change(pair.b, 0, 1000) == EOPNOTSUPP && outcome.how == CRUX_REFUSED);
  CHECK(change(unconnected, 50001, UINT64_MAX) == ENOTCONN);
  CHECK(crux_transport_change_queue_pair(999999, 50001, UINT64_MAX, nullptr) == ENOENT);
  CHECK(crux_transport_change_queue_pair(1, 70000, UINT64_MAX, nullptr) == EINVAL);
}

void a_destroyed_queue_pair_is_not_touched() {
  Pair pair;
  const auto known = crux::transport::verbs::queue_pairs().find(pair.a.described().id);
  pair.a.destroy();
  CHECK(crux::transport::verbs::change(*known, 50001, UINT64_MAX).error == ENOENT);
}

void a_forked_child_has_none() {
  Pair pair;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) _exit(crux_transport_connections(nullptr, 0) == 0 ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void many_threads_make_change_and_destroy_them() {
  const Routed routed("10.9.0.2", 26, {50001, 50002});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 20; ++round) {
        const Pair pair;
        std::vector<crux_connection> all(64);
        all.resize(std::min(all.size(), crux_transport_connections(all.data(), all.size())));
        CHECK(all.size() >= 2);
        for (const crux_connection& one : all)
          crux_transport_change_queue_pair(one.id, 50000 + round, UINT64_MAX, nullptr);
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
  the_nth_queue_pair_takes_the_nth_port();
  the_service_level_follows_the_class();
  a_class_that_the_program_chose_stays();
  a_refused_path_is_replaced_by_the_callers_own();
  a_device_without_a_call_for_it_is_not_changed();
  a_destroyed_queue_pair_is_not_touched();
  a_forked_child_has_none();
  many_threads_make_change_and_destroy_them();
  CHECK(fake_verbs::open_queue_pairs() == 0);
  return 0;
}
