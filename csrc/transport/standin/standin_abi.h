// Between libcrux_ibverbs.so (the stand-in for libibverbs) and libcrux_transport.so. Internal.
#ifndef CRUX_STANDIN_ABI_H
#define CRUX_STANDIN_ABI_H

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CRUX_STANDIN_ABI 1

// The calls of the real library. Those of the second group may be absent (null).
struct crux_verbs_calls {
  struct ibv_context* (*open_device)(struct ibv_device* device);
  int (*close_device)(struct ibv_context* context);
  struct ibv_cq* (*create_cq)(struct ibv_context* context, int cqe, void* cq_context,
                              struct ibv_comp_channel* channel, int comp_vector);
  int (*destroy_cq)(struct ibv_cq* cq);
  struct ibv_qp* (*create_qp)(struct ibv_pd* pd, struct ibv_qp_init_attr* attributes);
  int (*modify_qp)(struct ibv_qp* qp, struct ibv_qp_attr* attributes, int mask);
  int (*query_qp)(struct ibv_qp* qp, struct ibv_qp_attr* attributes, int mask,
                  struct ibv_qp_init_attr* init_attributes);
  int (*destroy_qp)(struct ibv_qp* qp);
  int (*query_gid)(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid);

  int (*query_ece)(struct ibv_qp* qp, struct ibv_ece* ece);
  int (*set_ece)(struct ibv_qp* qp, struct ibv_ece* ece);
};

// What the stand-in calls instead; `real` goes on to the library that the caller stands in for.
struct crux_verbs_hooks {
  struct ibv_context* (*open_device)(const struct crux_verbs_calls* real,
                                     struct ibv_device* device);
  int (*close_device)(const struct crux_verbs_calls* real, struct ibv_context* context);
  struct ibv_cq* (*create_cq)(const struct crux_verbs_calls* real, struct ibv_context* context,
                              int cqe, void* cq_context, struct ibv_comp_channel* channel,
                              int comp_vector);
  int (*destroy_cq)(const struct crux_verbs_calls* real, struct ibv_cq* cq);
  struct ibv_qp* (*create_qp)(const struct crux_verbs_calls* real, struct ibv_pd* pd,
                              struct ibv_qp_init_attr* attributes);
  int (*modify_qp)(const struct crux_verbs_calls* real, struct ibv_qp* qp,
                   struct ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(const struct crux_verbs_calls* real, struct ibv_qp* qp);
};

// Null where the two were built from different sources; the stand-in then only forwards. Weak: the
// template is built without libcrux_transport.so, which the copy names by its path.
__attribute__((weak, visibility("default"))) const struct crux_verbs_hooks*
crux_transport_attach_standin(int abi);

#ifdef __cplusplus
}
#endif
#endif
