// One collective as the recorder keeps it. crux_torch/measure/records.py describes the same 64
// bytes to numpy; tests/backend/test_recorder.py checks that the two agree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crux {

enum class Op : uint8_t {
  kUnknown,
  kAllreduce,
  kAllreduceCoalesced,
  kAllreduceSparse,
  kBroadcast,
  kReduce,
  kAllgather,
  kAllgatherSingle,
  kAllgatherCoalesced,
  kGather,
  kScatter,
  kReduceScatter,
  kReduceScatterSingle,
  kReduceScatterCoalesced,
  kAlltoall,
  kAlltoallSingle,
  kSend,
  kRecv,
  kBarrier,
  kCoalesced,
  kCount,
};

inline constexpr const char* kOpNames[] = {"unknown",
                                           "allreduce",
                                           "allreduce_coalesced",
                                           "allreduce_sparse",
                                           "broadcast",
                                           "reduce",
                                           "allgather",
                                           "allgather_single",
                                           "allgather_coalesced",
                                           "gather",
                                           "scatter",
                                           "reduce_scatter",
                                           "reduce_scatter_single",
                                           "reduce_scatter_coalesced",
                                           "alltoall",
                                           "alltoall_single",
                                           "send",
                                           "recv",
                                           "barrier",
                                           "coalesced"};
static_assert(sizeof(kOpNames) / sizeof(kOpNames[0]) == static_cast<size_t>(Op::kCount));

enum class Status : uint8_t { kOk, kFailed, kIncomplete };

enum Flag : uint8_t {
  kEndAtWait = 1,
  kInCoalescedGroup = 2,
  kDeviceClock = 4,  // start_ns is when the stream reached it, by the device's clock
  kSynchronous = 8,  // the caller, or its stream, waits for the end immediately
  kUntimed = 16,     // issued while the recorder did not time: only the call is known
};

inline constexpr int64_t kUnknownTime = -1;

struct Record {
  uint64_t sequence = 0;
  int64_t issue_ns = kUnknownTime;
  int64_t start_ns = kUnknownTime;
  int64_t end_ns = kUnknownTime;
  int64_t device_ns = kUnknownTime;
  int64_t bytes = 0;
  uint32_t group = 0;
  uint32_t world_size = 0;
  int32_t peer = -1;
  Op op = Op::kUnknown;
  uint8_t device = 0;
  Status status = Status::kOk;
  uint8_t flags = 0;
};
static_assert(sizeof(Record) == 64, "a record is one cache line");

}  // namespace crux
