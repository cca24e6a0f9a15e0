// One queue pair of this process: who it belongs to, how it was connected, what was set of it.
#pragma once

#include <infiniband/verbs.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "../address.h"
#include "../crux_transport.h"
#include "../registry.h"
#include "../standin/standin_abi.h"

namespace crux::transport::verbs {

// A call of ibv_modify_qp() as it was made.
struct Transition {
  ibv_qp_attr attributes{};
  int mask = 0;

  // Copies no more than the mask says is there: callers built against older headers have a
  // shorter structure.
  static Transition copy(const ibv_qp_attr& attributes, int mask);
};

// The part of an address vector that a plan decides on.
struct Path {
  uint8_t traffic_class = 0;
  uint32_t flow_label = 0;

  static Path of(const ibv_qp_attr& attributes);
  void write(ibv_qp_attr& attributes) const;
  friend bool operator==(const Path& a, const Path& b) {
    return a.traffic_class == b.traffic_class && a.flow_label == b.flow_label;
  }
};

struct LiveWork;
class RateLimit;

struct QueuePair {
  QueuePair(uint64_t id, const crux_verbs_calls& real, ibv_qp* handle);
  ~QueuePair();

  const uint64_t id;
  const crux_verbs_calls& real;
  ibv_qp* const handle;
  ibv_context* const context;
  const uint32_t number;
  const Name device;  // a copy: a device may be closed while this is read

  mutable std::mutex mutex;  // guards all that follows
  Name owner{};
  crux_how how = CRUX_UNTOUCHED;
  int error = 0;
  ibv_qp_state state;
  // The way to RTS, with what was modified since.
  Transition to_init, to_rtr, to_rts;
  bool has_alternate_path = false;
  Address local, peer;
  uint32_t peer_number = 0;
  Path path;
  uint16_t udp_port = 0;  // 0: not known
  uint64_t rate_Bps = 0;  // 0: no limit

  // What a live change needs; null, and why, where its work is not followed.
  std::unique_ptr<LiveWork> live;
  const char* not_followed = nullptr;
  bool may_reset = false;       // its owner allows it
  bool is_busy = false;         // some thread holds, changes or modifies it
  unsigned callers_wait = 0;    // for that thread: calls of the program itself, which go first
  uint64_t route_rate_Bps = 0;  // to be set in RTS
  std::shared_ptr<RateLimit> rate_limit;  // the device's, where there is one

  // `call` has succeeded.
  void remember(const Transition& call);
  crux_connection describe() const;
};

// While it lasts, no other thread modifies, changes or destroys the queue pair.
class Exclusive {
 public:
  enum class For {
    kCaller,  // the program's own call: waits for its turn, which is bounded
    kChange   // a change from outside: gives way at once
  };
  Exclusive(QueuePair& pair, For purpose);
  ~Exclusive();
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

  bool taken() const { return taken_; }

 private:
  QueuePair& pair_;
  bool taken_ = false;
};

}  // namespace crux::transport::verbs
