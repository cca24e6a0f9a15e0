// The internal interface between libcrux_ibverbs.so (the stand-in for libibverbs) and
// libcrux_transport.so.
#ifndef CRUX_STANDIN_ABI_H
#define CRUX_STANDIN_ABI_H

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CRUX_STANDIN_ABI 2

// The real library's functions.
struct crux_verbs_calls {
  int (*close_device)(struct ibv_context* context);
  struct ibv_qp* (*create_qp)(struct ibv_pd* pd, struct ibv_qp_init_attr* attributes);
  int (*modify_qp)(struct ibv_qp* qp, struct ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(struct ibv_qp* qp);
  int (*query_gid)(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid);
};

// The functions that the stand-in calls instead. `real` leads to the library that it stands in for.
struct crux_verbs_hooks {
  int (*close_device)(const struct crux_verbs_calls* real, struct ibv_context* context);
  struct ibv_qp* (*create_qp)(const struct crux_verbs_calls* real, struct ibv_pd* pd,
                              struct ibv_qp_init_attr* attributes);
  int (*modify_qp)(const struct crux_verbs_calls* real, struct ibv_qp* qp,
                   struct ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(const struct crux_verbs_calls* real, struct ibv_qp* qp);
};

// Null if the two were built from different sources; then the stand-in only forwards. Weak, because
// the template is linked without libcrux_transport.so; its copies name that library by path.
__attribute__((weak, visibility("default"))) const struct crux_verbs_hooks*
crux_transport_attach_standin(int abi);

#ifdef __cplusplus
}
#endif
#endif
