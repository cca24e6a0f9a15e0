// Files of routes, as anybody may write them.

#include <sstream>
#include <string>

#include "../../csrc/transport/route_file.h"
#include "check.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crux::transport;
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::istringstream stream(text);
  const RouteFile file = parse_routes(stream);
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  CHECK(file.routes.size() + file.ignored <= lines);
  CHECK((file.ignored == 0) == file.error.empty());
  for (const Route& route : file.routes) {
    CHECK(route.dscp >= -1 && route.dscp < 64);
    if (route.destination.is_any()) CHECK(route.hops.empty() && route.udp_ports.empty());
    CHECK(route.rate_Bps <= INT64_MAX);
    for (const uint16_t port : route.udp_ports) CHECK(port != 0);
    for (size_t i = 0; i < route.hops.size(); ++i) {
      const Hop& hop = route.hops[i];
      CHECK(hop.ttl >= 1 && hop.ttl <= 255 && !hop.addresses.empty());
      CHECK(i == 0 || route.hops[i - 1].ttl < hop.ttl);
      for (const Address& address : hop.addresses) CHECK(hop.accepts(address));
    }
  }
  Routes routes;
  routes.replace(file.routes);
  for (const Route& route : file.routes) CHECK(routes.to(route.destination) != nullptr);
  return 0;
}
