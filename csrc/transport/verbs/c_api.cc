// The C face of the queue pairs: checks what comes in, and lets no exception out.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>

#include "../crux_transport.h"
#include "followed.h"
#include "live_change.h"
#include "queue_pairs.h"

using namespace crux::transport::verbs;  // NOLINT: this file is the other side of that namespace
using std::chrono::milliseconds;

namespace {

template <typename Call>
int guarded(Call call) {
  try {
    return call();
  } catch (const std::exception&) {
    return ENOMEM;
  }
}

bool is_name(const char* text) { return text != nullptr && *text != '\0'; }

}  // namespace

int crux_transport_label(int32_t label, const char* owner, int32_t dscp) {
  if (label < 1 || label > 255 || dscp < -1 || dscp > 63 || !is_name(owner)) return EINVAL;
  return guarded([&] {
    queue_pairs().labels.set(static_cast<uint8_t>(label), {crux::transport::to_name(owner), dscp});
    return 0;
  });
}

int crux_transport_follow_queue_pairs(int on) {
  return guarded([on] {
    followed().enable(on != 0);
    return 0;
  });
}

int crux_transport_allow_reset(uint64_t id, const char* owner, int allow) {
  if (id == 0 && !is_name(owner)) return EINVAL;
  return guarded([&] {
    if (id != 0) return queue_pairs().allow_reset(id, allow != 0) ? 0 : ENOENT;
    queue_pairs().allow_reset(owner, allow != 0);
    return 0;
  });
}

int crux_transport_hold(uint64_t id, uint32_t timeout_ms, uint32_t lease_ms) {
  return guarded([&] {
    const auto pair = queue_pairs().find(id);
    return pair ? hold(*pair, milliseconds(timeout_ms), milliseconds(lease_ms)) : ENOENT;
  });
}

int crux_transport_release(uint64_t id) {
  return guarded([&] {
    const auto pair = queue_pairs().find(id);
    return pair ? release(*pair) : ENOENT;
  });
}

int crux_transport_change_queue_pair(uint64_t id, const crux_queue_pair_change* wanted,
                                     crux_queue_pair_outcome* out) {
  if (wanted == nullptr || wanted->dscp < -1 || wanted->dscp > 63 || wanted->udp_port > 65535)
    return EINVAL;
  const auto start = std::chrono::steady_clock::now();
  return guarded([&] {
    const auto pair = queue_pairs().find(id);
    const Outcome outcome =
        pair ? change(*pair,
                      {wanted->dscp, static_cast<uint16_t>(wanted->udp_port), wanted->rate_Bps},
                      milliseconds(wanted->timeout_ms))
             : Outcome{CRUX_UNTOUCHED, ENOENT, false, "there is no such queue pair"};
    if (out == nullptr) return outcome.error;
    *out = {};
    out->how = outcome.how;
    out->error = outcome.error;
    out->applied = outcome.is_applied;
    out->took_ns = static_cast<uint64_t>((std::chrono::steady_clock::now() - start).count());
    std::strncpy(out->reason, outcome.reason, sizeof out->reason - 1);
    return outcome.error;
  });
}
