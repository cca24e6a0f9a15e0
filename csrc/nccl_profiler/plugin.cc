// The plugin that NCCL loads (NCCL_PROFILER_PLUGIN), and what Crux reads of it.
//
// NCCL calls it from the threads that issue operations and from those that progress its proxy, in
// the middle of their work: so nothing here waits, and no error is ever returned, for NCCL would go
// on half profiled.
#include <unistd.h>

#include <array>
#include <new>

#include "communicator.h"
#include "profiler_abi.h"

namespace crux::nccl_profiler {
namespace {

// Coll and P2p events come with these two anyhow, so that they have parents; they cost a call each.
constexpr int kMask = kCollective | kPointToPoint | kProxyOperation | kProxyStep;
// NCCL_STEPS: the most transfers of one operation that can be open at a time.
constexpr int kSlots = 8;

struct Operation;

// One transfer over the network, of one channel to one peer.
struct Step {
  Operation* operation = nullptr;
  uint64_t bytes = 0;
  bool open = false;
  bool sending = false;
};

// What NCCL's proxy has to move for one operation on one channel to one peer. One thread progresses
// it, so only that thread touches what is in here.
struct Operation {
  explicit Operation(Counters& into, Communicator* of) : counters(into), communicator(of) {
    if (of != nullptr) of->open_operations.fetch_add(1, std::memory_order_relaxed);
    for (Step& step : steps) step.operation = this;
  }
  ~Operation() {
    if (communicator != nullptr)
      communicator->open_operations.fetch_sub(1, std::memory_order_release);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  Step* open_step() {
    for (Step& step : steps) {
      if (step.open) continue;
      step.open = true;
      step.sending = false;
      ++open_steps;
      return &step;
    }
    return nullptr;
  }

  Counters& counters;
  Communicator* communicator;
  std::array<Step, kSlots> steps;
  int open_steps = 0;
  bool stopped = false;
};

// A handle is a pointer to one of these two; the lowest bit, free by their alignment, says which.
constexpr uintptr_t kIsStep = 1;
static_assert(alignof(Step) > kIsStep && alignof(Operation) > kIsStep);

void* handle_of(Step* step) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(step) | kIsStep);
}

Step* step_of(void* handle) {
  const auto bits = reinterpret_cast<uintptr_t>(handle);
  return bits & kIsStep ? reinterpret_cast<Step*>(bits & ~kIsStep) : nullptr;
}

Operation* operation_of(void* handle) {
  return step_of(handle) == nullptr ? static_cast<Operation*>(handle) : nullptr;
}

void release(Operation* operation) {
  if (operation->stopped && operation->open_steps == 0) delete operation;
}

Operation* start_operation(void* context, const ProxyOperation& description) {
  // PXN: NCCL's proxy of this process sends for another one, whose context is an address of its
  // memory. Nothing tells which communicator that is.
  static const pid_t self = ::getpid();
  const bool own = description.pid == self;
  auto* communicator = own ? static_cast<Communicator*>(context) : nullptr;
  if (own && communicator == nullptr) return nullptr;
  Counters& counters = own ? communicator->counters : Registry::instance().forwarded();
  auto* operation = new (std::nothrow) Operation(counters, communicator);
  if (operation == nullptr) counters.add_untracked();
  return operation;
}

Step* start_step(Operation* operation) {
  if (operation == nullptr) return nullptr;
  Step* step = operation->open_step();
  if (step == nullptr) operation->counters.add_untracked();
  return step;
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
  auto* communicator = static_cast<Communicator*>(context);
  switch (description->type) {
    case kCollective:
      if (communicator != nullptr) communicator->counters.add_collective();
      break;
    case kPointToPoint:
      if (communicator != nullptr) communicator->counters.add_point_to_point();
      break;
    case kProxyOperation:
      *handle = start_operation(context, description->proxy_operation);
      break;
    case kProxyStep:
      // Not of the context: see start_operation.
      if (Step* step = start_step(operation_of(description->parent))) *handle = handle_of(step);
      break;
    default:
      break;
  }
  return kSuccess;
}

Result record_state(void* handle, int state, StateArguments* arguments) {
  Step* step = step_of(handle);
  if (step == nullptr) return kSuccess;
  const uint64_t bytes = arguments == nullptr ? 0 : arguments->transferred_bytes;
  Counters& counters = step->operation->counters;
  if (state == kSendWait && !step->sending) {
    step->sending = counters.begin_send();
    step->bytes = bytes;
    if (!step->sending) counters.add_untracked();
  } else if (state == kReceiveFlush) {
    counters.add_receive(bytes);
  }
  return kSuccess;
}

Result stop_event(void* handle) {
  if (handle == nullptr) return kSuccess;
  if (Step* step = step_of(handle)) {
    Operation* operation = step->operation;
    if (step->sending) operation->counters.end_send(step->bytes);
    step->open = step->sending = false;
    --operation->open_steps;
    release(operation);
    return kSuccess;
  }
  auto* operation = static_cast<Operation*>(handle);
  operation->stopped = true;
  release(operation);
  return kSuccess;
}

Result finalize(void* context) {
  if (context != nullptr) Registry::instance().end(static_cast<Communicator*>(context));
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
