// Connects one end of a reliable connection, as every program of verbs does.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

// Takes it through INIT, RTR and RTS by `modify(attributes, mask)`; returns the first error, or 0.
template <typename Modify>
int rc_connect(uint32_t peer_number, const ibv_gid& peer, uint8_t traffic_class, Modify modify) {
  ibv_qp_attr init{}, rtr{}, rts{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = 1;
  rtr.qp_state = IBV_QPS_RTR;
  rtr.dest_qp_num = peer_number;
  rtr.ah_attr.is_global = 1;
  rtr.ah_attr.port_num = 1;
  rtr.ah_attr.grh.sgid_index = 1;
  rtr.ah_attr.grh.dgid = peer;
  rtr.ah_attr.grh.traffic_class = traffic_class;
  rts.qp_state = IBV_QPS_RTS;
  int error = modify(init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error == 0)
    error = modify(rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error == 0)
    error = modify(rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                            IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  return error;
}
