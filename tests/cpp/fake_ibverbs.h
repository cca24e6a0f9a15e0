// An RDMA device in memory: queue pairs that connect and keep their attributes, but move no data.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "../../csrc/transport/standin/standin_abi.h"

namespace fake_verbs {

const crux_verbs_calls& calls();
ibv_context* open_device(ibv_device* device);
// Device 0 or 1; its address is 10.9.0.1 or 10.9.0.2, at GID index 1.
ibv_device* device(int index);

// ibv_modify_qp() refuses address vectors with a flow label with `error`; 0: it takes them.
void refuse_flow_labels(int error);
// As mlx5dv_modify_qp_udp_sport() does.
void set_live_port(ibv_qp* handle, uint16_t udp_port);

// What each packet of a queue pair would carry.
struct Wire {
  uint8_t traffic_class = 0;
  uint8_t service_level = 0;
  uint16_t udp_port = 0;
};
Wire wire(uint32_t qp_num);
int open_queue_pairs();

}  // namespace fake_verbs
