// An RDMA device in memory, strict where real ones are: enough of verbs to connect queue pairs,
// move messages between them, and reset one in the middle of it.
//
// Like real ones it numbers what it sends and takes only the number that it expects; RESET silently
// discards what was posted, and what was completed and not yet polled.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "../../csrc/transport/standin/standin_abi.h"

namespace fake_verbs {

const crux_verbs_calls& calls();
// Device 0 or 1; its address is 10.9.0.1 or 10.9.0.2, at GID index 1.
ibv_device* device(int index);

// Moves what can be moved: returns how many messages and acknowledgements.
int pump();
// Lets a thread do that from now on until stop().
void start();
void stop();

// Every n-th call that would bring a queue pair into `state` fails with EIO; 0: none.
void fail_modify(ibv_qp_state state, int every);
// ibv_modify_qp() refuses address vectors with a flow label.
void refuse_flow_labels(bool on);
// Called by every ibv_query_qp() before it answers; null: nothing.
void on_query(std::function<void()> call);
// As mlx5dv_modify_qp_udp_sport() does.
void set_live_port(ibv_qp* handle, uint16_t udp_port);

// What the last message of a queue pair carried.
struct Wire {
  uint8_t traffic_class = 0;
  uint16_t udp_port = 0;
  uint64_t messages = 0;
};
Wire wire(uint32_t qp_num);
// Queue pairs, and completions that had no room.
int open_queue_pairs();
int overruns();

}  // namespace fake_verbs
