#include "route_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "crux_transport.h"

namespace crux::transport {
namespace {

// Ends the reading of one line.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

uint64_t number(const std::string& text, uint64_t least, uint64_t most, const char* what) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < least ||
      value > most) {
    throw Malformed("'" + text + "' is no " + what);
  }
  return value;
}

Address address(const std::string& text) {
  const auto parsed = Address::parse(text.c_str());
  if (!parsed || parsed->is_any()) throw Malformed("'" + text + "' is no address");
  return *parsed;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

void add_hops(Route& route, const std::string& text) {
  const size_t colon = text.find(':');
  const auto ttl = static_cast<int>(number(text.substr(0, colon), 1, 255, "TTL"));
  if (colon == std::string::npos) throw Malformed("'" + text + "' is not TTL:ADDRESS");
  const std::vector<std::string> addresses = split(text.substr(colon + 1));
  if (addresses.empty()) throw Malformed("'" + text + "' names no address");
  for (const std::string& one : addresses) route.add_hop(ttl, address(one));
}

// False for a line without a route.
bool parse_line(const std::string& line, Route& route) {
  std::istringstream words(line.substr(0, line.find('#')));
  std::string word, value;
  if (!(words >> word)) return false;
  const bool everywhere = word == "*";
  if (!everywhere) route.destination = address(word);
  while (words >> word) {
    if (!(words >> value)) throw Malformed("'" + word + "' lacks its value");
    if (word == "via") {
      add_hops(route, value);
    } else if (word == "dscp") {
      route.dscp = static_cast<int>(number(value, 0, 63, "DSCP"));
    } else if (word == "qp_dscp") {
      route.qp_dscp = static_cast<int>(number(value, 0, 63, "DSCP"));
    } else if (word == "overrides") {
      route.overrides = number(value, 0, 1, "0 or 1") != 0;
    } else if (word == "rate") {
      route.rate_Bps = number(value, 1, INT64_MAX, "rate");
    } else if (word == "ports") {
      for (const std::string& port : split(value)) {
        route.udp_ports.push_back(static_cast<uint16_t>(number(port, 1, 65535, "port")));
      }
    } else {
      throw Malformed("'" + word + "' is none of via, dscp, qp_dscp, overrides, rate, ports");
    }
  }
  if (everywhere && !(route.hops.empty() && route.udp_ports.empty())) {
    throw Malformed("'*' takes no via and no ports: a path leads to one destination");
  }
  return true;
}

}  // namespace

RouteFile parse_routes(std::istream& text) {
  RouteFile file;
  std::string line;
  for (size_t number = 1; std::getline(text, line); ++number) {
    try {
      Route route;
      if (parse_line(line, route)) file.routes.push_back(std::move(route));
    } catch (const Malformed& error) {
      if (file.ignored++ == 0) {
        file.error = "line " + std::to_string(number) + ": " + error.what();
      }
    }
  }
  return file;
}

bool read_routes_file(const char* path, std::string& text, std::string& why) {
  const int descriptor = ::open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  if (descriptor < 0) {
    why = std::strerror(errno);
    return false;
  }
  struct stat about = {};
  bool good = ::fstat(descriptor, &about) == 0;
  if (!good) why = std::strerror(errno);
  if (good && !S_ISREG(about.st_mode)) {
    why = "it is no regular file";
    good = false;
  }
  char part[65536];
  while (good) {
    const ssize_t got = ::read(descriptor, part, sizeof part);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) why = std::strerror(errno);
    if (got <= 0) {
      good = got == 0;
      break;
    }
    text.append(part, static_cast<size_t>(got));
    if (text.size() > kMaxRoutesBytes) {
      why = "it is larger than 16 MiB";
      good = false;
    }
  }
  ::close(descriptor);
  return good;
}

}  // namespace crux::transport
