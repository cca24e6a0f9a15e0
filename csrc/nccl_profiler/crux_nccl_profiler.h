/* What a process reads of its NCCL communicators' use of the network: the C ABI of
 * libcrux_nccl_profiler.so beside NCCL's own (profiler_abi.h). Every function may be called from
 * any thread, at any time. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define CRUX_NCCL_PROFILER_ABI 1
#define CRUX_NCCL_NAME 64

/* What a communicator has moved over the network since it was made, all channels together. What
 * stays inside a host (NVLink, PCIe, shared memory) does not count. */
typedef struct crux_nccl_traffic {
  uint64_t collectives;    /* started */
  uint64_t point_to_point; /* sends and receives that were started */
  uint64_t sends;          /* that the network has reported done */
  uint64_t sent_bytes;     /* that the network was handed */
  uint64_t receives;       /* that the network has delivered */
  uint64_t received_bytes; /* of these; networks that report no sizes make it 0 */
  uint64_t sending_ns;     /* with at least one send in the network's hands */
  uint64_t untracked;      /* operations that could not be followed, and are in none of these */
} crux_nccl_traffic;

typedef struct crux_nccl_communicator {
  uint64_t id;               /* NCCL's commHash: the same on all ranks */
  char name[CRUX_NCCL_NAME]; /* ncclConfig_t.commName, cut; empty where none was given */
  int32_t rank;
  int32_t ranks;
  int32_t nodes;
  int32_t ended; /* 1 once NCCL has finalized it */
  crux_nccl_traffic traffic;
} crux_nccl_communicator;

/* CRUX_NCCL_PROFILER_ABI of the library. */
int32_t crux_nccl_profiler_abi(void);

/* Writes up to capacity communicators, oldest first, and returns how many there are; those that
 * ended long ago are not among them. out may be NULL where capacity is 0. */
int32_t crux_nccl_profiler_communicators(crux_nccl_communicator* out, int32_t capacity);

/* Everything that this process has moved: all communicators, ended ones too, and what its proxy has
 * sent for other processes of the host (PXN). sending_ns is the time in which any of them sent. */
void crux_nccl_profiler_totals(crux_nccl_traffic* out);

/* Of the totals, what was sent for other processes of the host (PXN). */
void crux_nccl_profiler_forwarded(crux_nccl_traffic* out);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
