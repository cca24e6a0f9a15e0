// The C interface of the queue pairs: checks the arguments, and lets no exception out.
#include <cerrno>
#include <cstring>
#include <exception>

#include "../crux_transport.h"
#include "../inside.h"
#include "live_change.h"
#include "queue_pairs.h"

using namespace crux::transport::verbs;  // NOLINT: this file is the other side of that namespace

int crux_transport_label(int32_t label, const char* owner, int32_t dscp) try {
  if (label < 1 || label > 255 || dscp < -1 || dscp > 63 || owner == nullptr || *owner == '\0')
    return EINVAL;
  queue_pairs().labels.set(static_cast<uint8_t>(label), {crux::transport::to_name(owner), dscp});
  return 0;
} catch (const std::exception&) {
  return ENOMEM;
}

int crux_transport_change_queue_pair(uint64_t id, uint32_t udp_port, uint64_t rate_Bps,
                                     crux_queue_pair_outcome* out) try {
  const crux::transport::Uncancelled whole;
  if (udp_port > 65535) return EINVAL;
  const auto pair = queue_pairs().find(id);
  const Outcome outcome = pair ? change(*pair, static_cast<uint16_t>(udp_port), rate_Bps)
                               : Outcome{CRUX_UNTOUCHED, ENOENT, "there is no such queue pair"};
  if (out != nullptr) {
    *out = {};
    out->how = outcome.how;
    out->error = outcome.error;
    std::strncpy(out->reason, outcome.reason, sizeof out->reason - 1);
  }
  return outcome.error;
} catch (const std::exception&) {
  return ENOMEM;
}
