#include "transport.h"

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>

#include "real_calls.h"
#include "route_file.h"

namespace crux::transport {
namespace {

std::atomic<Transport*> instance{nullptr};

const char* setting(const char* name) {
  const char* const text = ::secure_getenv(name);
  return text == nullptr ? "" : text;
}

bool is_true(const char* name) {
  const std::string text = setting(name);
  return !text.empty() && text != "0" && text != "false" && text != "no" && text != "off";
}

bool is_off(const char* name) { return *setting(name) != '\0' && !is_true(name); }

// The port at the end of "29500", "host:29500" or "tcp://host:29500"; 0 if there is none.
uint16_t trailing_port(const std::string& text) {
  const std::string digits = text.substr(text.rfind(':') + 1);
  char* end = nullptr;
  const unsigned long port = std::strtoul(digits.c_str(), &end, 10);
  return digits.empty() || *end != '\0' || port > 65535 ? 0 : static_cast<uint16_t>(port);
}

void use_routes(Transport& transport, const char* source, const std::string& text) {
  std::istringstream lines(text);
  RouteFile read = parse_routes(lines);
  if (!read.error.empty()) {
    std::fprintf(stderr, "crux_transport: %s, %s; lines ignored: %zu\n", source, read.error.c_str(),
                 read.ignored);
  }
  transport.routes.replace(std::move(read.routes));
}

void read_routes(Transport& transport, const char* path) {
  std::string text, why;
  if (read_routes_file(path, text, why)) return use_routes(transport, path, text);
  std::fprintf(stderr, "crux_transport: %s can't be read (%s): connections are not steered\n", path,
               why.c_str());
}

void read_environment(Transport& transport) {
  transport.enabled = !is_off("CRUX_TRANSPORT") && !is_true("CRUX_DISABLE");
  transport.steer_all = is_true("CRUX_TRANSPORT_STEER_ALL");
  transport.log = is_true("CRUX_TRANSPORT_LOG");
  for (const char* name : {"MASTER_PORT", "PET_RDZV_ENDPOINT", "CRUX_STORE"}) {
    if (const uint16_t port = trailing_port(setting(name))) transport.routes.skip(port);
  }
  unsigned first = 0, last = 0;
  if (std::sscanf(setting("CRUX_PORTS"), "%u-%u", &first, &last) == 2 && first >= 1024 &&
      first <= last && last <= 65535) {
    transport.routes.set_ports({static_cast<uint16_t>(first), static_cast<uint16_t>(last)});
  }
  unsigned probe_ms = 0;
  if (std::sscanf(setting("CRUX_TRANSPORT_PROBE_MS"), "%u", &probe_ms) == 1 && probe_ms <= 60000) {
    transport.limits.time = std::chrono::milliseconds(probe_ms);
  }
  std::istringstream left_alone(setting("CRUX_TRANSPORT_SKIP_PORTS"));
  for (std::string port; std::getline(left_alone, port, ',');) {
    transport.routes.skip(trailing_port(port));
  }
  if (const char* text = setting("CRUX_TRANSPORT_ROUTE_LINES"); *text != '\0') {
    use_routes(transport, "CRUX_TRANSPORT_ROUTE_LINES", text);
  } else if (const char* path = setting("CRUX_TRANSPORT_ROUTES"); *path != '\0') {
    read_routes(transport, path);
  }
}

// The interpreter of a rank was started with this library, and starts other programs without it:
// those of another libc or of a sanitizer could not start. A program on the way to the interpreter
// (a shell, numactl) passes both variables on.
void leave_environment() {
  const char* const then = ::secure_getenv("CRUX_LD_PRELOAD_THEN");
  if (then == nullptr || ::dlsym(RTLD_DEFAULT, "Py_IsInitialized") == nullptr) return;
  if (*then == '\0') {
    ::unsetenv("LD_PRELOAD");
  } else {
    ::setenv("LD_PRELOAD", then, 1);
  }
  ::unsetenv("CRUX_LD_PRELOAD_THEN");
}

__attribute__((constructor)) void initialise() {
  const int before = errno;
  leave_environment();
  real_connect();
  real_accept();
  real_accept4();
  try {
    auto made = std::make_unique<Transport>();
    read_environment(*made);
    instance.store(made.release());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crux_transport: %s: connections are neither seen nor steered\n",
                 error.what());
  }
  errno = before;
}

}  // namespace

Transport* transport() { return instance.load(std::memory_order_acquire); }

}  // namespace crux::transport
