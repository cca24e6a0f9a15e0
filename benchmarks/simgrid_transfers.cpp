// Runs a list of transfers in SimGrid and prints the wall time of the run, then each one's end.
//
// Usage: simgrid_transfers FILE. The file holds numbers only:
//   links, then each one's bytes/s; hosts; transfers, then for each
//   start_s bytes source destination number_of_links link...
// The fluid model is the plain max-min one: CM02 without TCP window, latency or bandwidth factors,
// and without traffic of acknowledgements. Lazy: only what an event changes is solved anew.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <simgrid/s4u.hpp>
#include <string>
#include <vector>

namespace sg = simgrid::s4u;

struct Transfer {
  double start_s = 0.0;
  double bytes = 0.0;
  std::size_t source = 0;
  std::size_t destination = 0;
  double end_s = 0.0;
};

int main(int argc, char** argv) {
  sg::Engine engine(&argc, argv);
  for (const char* option : {"network/model:CM02", "network/TCP-gamma:0", "network/weight-S:0",
                             "network/bandwidth-factor:1", "network/latency-factor:1",
                             "network/crosstraffic:0", "network/optim:Lazy"}) {
    sg::Engine::set_config(option);
  }
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s FILE\n", argv[0]);
    return 2;
  }
  std::ifstream file(argv[1]);
  sg::NetZone* zone = sg::create_full_zone("zone");

  std::size_t link_count = 0;
  file >> link_count;
  std::vector<const sg::Link*> links;
  for (std::size_t i = 0; i < link_count; ++i) {
    double capacity_Bps = 0.0;
    file >> capacity_Bps;
    links.push_back(
        zone->create_link("l" + std::to_string(i), capacity_Bps)->set_latency(0.0)->seal());
  }
  std::size_t host_count = 0;
  file >> host_count;
  std::vector<sg::Host*> hosts;
  for (std::size_t i = 0; i < host_count; ++i) {
    hosts.push_back(zone->create_host("h" + std::to_string(i), 1e9)->seal());
  }
  std::size_t transfer_count = 0;
  file >> transfer_count;
  std::vector<Transfer> transfers(transfer_count);
  for (Transfer& transfer : transfers) {
    std::size_t hops = 0;
    file >> transfer.start_s >> transfer.bytes >> transfer.source >> transfer.destination >> hops;
    std::vector<sg::LinkInRoute> route;
    for (std::size_t i = 0; i < hops; ++i) {
      std::size_t link = 0;
      file >> link;
      route.emplace_back(links[link]);
    }
    zone->add_route(hosts[transfer.source]->get_netpoint(),
                    hosts[transfer.destination]->get_netpoint(), nullptr, nullptr, route, false);
  }
  if (!file) {
    std::fprintf(stderr, "%s: malformed\n", argv[1]);
    return 1;
  }
  zone->seal();

  std::vector<std::size_t> order(transfers.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return transfers[a].start_s < transfers[b].start_s;
  });
  std::vector<sg::CommPtr> comms(transfers.size());
  sg::Actor::create("sender", hosts[0], [&] {
    std::vector<sg::CommPtr> all;
    for (std::size_t i : order) {
      const Transfer& transfer = transfers[i];
      sg::this_actor::sleep_until(transfer.start_s);
      comms[i] = sg::Comm::sendto_async(hosts[transfer.source], hosts[transfer.destination],
                                        static_cast<uint64_t>(transfer.bytes));
      all.push_back(comms[i]);
    }
    sg::Comm::wait_all(all);
  });
  const auto begin = std::chrono::steady_clock::now();
  engine.run();
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    transfers[i].end_s = comms[i]->get_finish_time();
  }
  std::printf("%.9f\n", wall.count());
  for (const Transfer& transfer : transfers) std::printf("%.9g\n", transfer.end_s);
  return 0;
}
