// The plugin that NCCL loads (NCCL_PROFILER_PLUGIN), and what Crux reads of it.
//
// NCCL calls it from the threads that issue operations and from those that progress its proxy, in
// the middle of their work: so nothing here waits, and no error is ever returned, for NCCL would go
// on half profiled.
#include <unistd.h>

#include "communicator.h"
#include "profiler_abi.h"

namespace crux::nccl_profiler {
namespace {

// Coll and P2p events come with these two anyhow, so that they have parents; they cost a call each.
constexpr int kMask = kCollective | kPointToPoint | kProxyOperation | kProxyStep;

// NCCL starts an operation's event for every transport and ends it for the network's alone, and
// starts a receive's transfer anew each time that it fails to post it (proxy.cc, net.cc). So a
// handle owns nothing: it is the address of the counters, and in its low bits what it stands for.
constexpr uintptr_t kIsStep = 1, kIsSend = 2, kAllBits = kIsStep | kIsSend;
static_assert(alignof(Counters) > kAllBits);

void* handle_of(Counters& counters, uintptr_t bits) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(&counters) | bits);
}

bool is(const void* handle, uintptr_t bits) {
  return (reinterpret_cast<uintptr_t>(handle) & bits) == bits;
}

Counters& counters_of(void* handle) {
  return *reinterpret_cast<Counters*>(reinterpret_cast<uintptr_t>(handle) & ~uintptr_t{kAllBits});
}

void* start_operation(const void* context, const ProxyOperation& description) {
  // PXN: NCCL's proxy of this process sends for another one of this host, whose number may be ours
  // where it has a PID namespace of its own. Nothing tells which communicator that is.
  static const pid_t self = ::getpid();
  Registry& registry = Registry::instance();
  Communicator* communicator = description.pid == self ? registry.find(context) : nullptr;
  if (context == nullptr) {
    registry.forwarded().add_untracked();
    return nullptr;
  }
  Counters& counters = communicator == nullptr ? registry.forwarded() : communicator->counters;
  return handle_of(counters, description.is_send != 0 ? kIsSend : 0);
}

Result init(void** context, uint64_t communicator, int* mask, const char* name, int nodes,
            int ranks, int rank, void*) {
  *context = Registry::instance().add(communicator, name, nodes, ranks, rank);
  // One mask for the whole process, which threads of other communicators are reading.
  __atomic_store_n(mask, kMask, __ATOMIC_RELAXED);
  return kSuccess;
}

Result start_event(void* context, void** handle, EventDescription* description) {
  *handle = nullptr;
  switch (description->type) {
    case kCollective:
      if (Communicator* of = Registry::instance().find(context)) of->counters.add_collective();
      break;
    case kPointToPoint:
      if (Communicator* of = Registry::instance().find(context)) of->counters.add_point_to_point();
      break;
    case kProxyOperation:
      *handle = start_operation(context, description->proxy_operation);
      break;
    case kProxyStep:
      // Not of the context: see start_operation.
      if (void* operation = description->parent) {
        *handle = handle_of(counters_of(operation),
                            kIsStep | (is(operation, kIsSend) ? kIsSend : uintptr_t{0}));
      }
      break;
    default:
      break;
  }
  return kSuccess;
}

Result record_state(void* handle, int state, StateArguments* arguments) {
  if (!is(handle, kIsStep)) return kSuccess;
  const uint64_t bytes = arguments == nullptr ? 0 : arguments->transferred_bytes;
  if (state == kSendWait && is(handle, kIsSend)) {
    counters_of(handle).begin_send(bytes);
  } else if (state == kReceiveFlush) {
    counters_of(handle).add_receive(bytes);
  }
  return kSuccess;
}

Result stop_event(void* handle) {
  if (is(handle, kIsStep | kIsSend)) counters_of(handle).end_send();
  return kSuccess;
}

Result finalize(void* context) {
  if (Communicator* of = Registry::instance().find(context)) Registry::instance().end(of);
  return kSuccess;
}

}  // namespace
}  // namespace crux::nccl_profiler

using namespace crux::nccl_profiler;

extern "C" {

__attribute__((visibility("default"))) Plugin ncclProfiler_v5 = {
    "crux", init, start_event, stop_event, record_state, finalize};

int32_t crux_nccl_profiler_abi(void) { return CRUX_NCCL_PROFILER_ABI; }

int32_t crux_nccl_profiler_communicators(crux_nccl_communicator* out, int32_t capacity) {
  return Registry::instance().read(out, capacity);
}

void crux_nccl_profiler_totals(crux_nccl_traffic* out) { Registry::instance().read_totals(*out); }

void crux_nccl_profiler_forwarded(crux_nccl_traffic* out) {
  Registry::instance().read_forwarded(*out);
}

}  // extern "C"
