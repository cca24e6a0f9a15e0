// The part of NCCL's profiler plugin interface, version 5, that the plugin uses.
//
// NCCL 2.28 looks for the symbol ncclProfiler_v5; 2.30 looks for newer ones first, and then
// translates between this one and its own. The layouts are those of ncclProfilerEventDescr_v5_t,
// ncclProfilerEventStateArgs_v5_t and ncclProfiler_v5_t; what is not read here only takes its room.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace crux::nccl_profiler {

using Result = int;  // ncclResult_t
constexpr Result kSuccess = 0;

// Types of event, the bits of the activation mask.
enum EventType : uint64_t {
  kCollective = 1 << 1,
  kPointToPoint = 1 << 2,
  kProxyOperation = 1 << 3,
  kProxyStep = 1 << 4,
};

// States of a proxy step that matter here; NCCL reports each after it was entered.
enum EventState : int {
  kSendWait = 9,       // the network has been given the data
  kReceiveFlush = 11,  // the network has delivered the data
};

struct ProxyOperation {
  pid_t pid;  // of the process whose communicator this is
  uint8_t channel;
  int peer;
  int steps;
  int chunk_bytes;
  int is_send;
};

struct EventDescription {
  uint64_t type;
  void* parent;
  int rank;
  union {
    // The largest member that NCCL fills, a collective's, has eleven words.
    uint64_t room[11];
    ProxyOperation proxy_operation;
  };
};

union StateArguments {
  size_t transferred_bytes;  // of a proxy step
  uint64_t room;
};

struct Plugin {
  const char* name;
  Result (*init)(void** context, uint64_t communicator, int* mask, const char* name, int nodes,
                 int ranks, int rank, void* log);
  Result (*start_event)(void* context, void** handle, EventDescription* description);
  Result (*stop_event)(void* handle);
  Result (*record_state)(void* handle, int state, StateArguments* arguments);
  Result (*finalize)(void* context);
};

static_assert(offsetof(EventDescription, proxy_operation) == 24 &&
                  offsetof(ProxyOperation, is_send) == 20,
              "not NCCL's layout");
static_assert(sizeof(Plugin) == 6 * sizeof(void*), "not NCCL's layout");

}  // namespace crux::nccl_profiler
