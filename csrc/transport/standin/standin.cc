// libcrux_ibverbs.so: a template from which crux_torch/apply/standin.py makes a stand-in for the
// installed libibverbs, whatever release that is. No compiler is needed for that.
//
// The copy gets the SONAME that callers ask for, a DT_NEEDED on the absolute path of the real
// library, and the real library's version nodes; what is not defined here resolves in the real one.
// Built without the C++ library: it is loaded into every process of a job.
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

#include "standin_abi.h"

namespace {

// Rewritten in the copy: the real library's path; a string table; version definitions.
struct Room {
  char magic[16];
  char real_path[4080];
  char tables[61440];
};
// volatile: the compiler must not take what stands here for what the copy holds.
__attribute__((used, aligned(16))) volatile const Room room = {"CRUX-STAND-IN-1", {}, {}};

crux_verbs_calls real{};
const crux_verbs_hooks* hooks = nullptr;

template <typename Function>
void find(void* library, const char* name, const char* version, Function& function) {
  function = reinterpret_cast<Function>(dlvsym(library, name, version));
}

__attribute__((constructor)) void attach() {
  char path[sizeof(Room::real_path)];
  for (size_t i = 0; i < sizeof path; ++i) path[i] = room.real_path[i];
  path[sizeof path - 1] = '\0';
  // Mapped already, by DT_NEEDED; by its path, because its SONAME may be this library's.
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    fprintf(stderr, "crux: the real libibverbs (%s) can't be found: %s\n", path, dlerror());
    return;
  }
  find(library, "ibv_open_device", "IBVERBS_1.1", real.open_device);
  find(library, "ibv_close_device", "IBVERBS_1.1", real.close_device);
  find(library, "ibv_create_cq", "IBVERBS_1.1", real.create_cq);
  find(library, "ibv_destroy_cq", "IBVERBS_1.1", real.destroy_cq);
  find(library, "ibv_create_qp", "IBVERBS_1.1", real.create_qp);
  find(library, "ibv_modify_qp", "IBVERBS_1.1", real.modify_qp);
  find(library, "ibv_query_qp", "IBVERBS_1.1", real.query_qp);
  find(library, "ibv_destroy_qp", "IBVERBS_1.1", real.destroy_qp);
  find(library, "ibv_query_gid", "IBVERBS_1.1", real.query_gid);
  find(library, "ibv_query_ece", "IBVERBS_1.10", real.query_ece);
  find(library, "ibv_set_ece", "IBVERBS_1.10", real.set_ece);
  const bool whole = real.open_device && real.close_device && real.create_cq && real.destroy_cq &&
                     real.create_qp && real.modify_qp && real.query_qp && real.destroy_qp &&
                     real.query_gid;
  if (whole && crux_transport_attach_standin != nullptr)
    hooks = crux_transport_attach_standin(CRUX_STANDIN_ABI);
  if (hooks == nullptr)
    fprintf(stderr, "crux: queue pairs are left alone: %s\n",
            whole ? "libcrux_transport.so is missing or of another build"
                  : "the real libibverbs lacks a function");
}

template <typename Result>
Result absent(Result result) {
  errno = ENOSYS;
  return result;
}

}  // namespace

// Under names of their own, because <infiniband/verbs.h> has some of the real ones as macros.
extern "C" {

__attribute__((visibility("default"))) ibv_context* crux_open_device(ibv_device* device) {
  if (hooks) return hooks->open_device(&real, device);
  return real.open_device ? real.open_device(device) : absent<ibv_context*>(nullptr);
}

__attribute__((visibility("default"))) int crux_close_device(ibv_context* context) {
  if (hooks) return hooks->close_device(&real, context);
  return real.close_device ? real.close_device(context) : absent(-1);
}

__attribute__((visibility("default"))) ibv_cq* crux_create_cq(ibv_context* context, int cqe,
                                                              void* cq_context,
                                                              ibv_comp_channel* channel,
                                                              int comp_vector) {
  if (hooks) return hooks->create_cq(&real, context, cqe, cq_context, channel, comp_vector);
  return real.create_cq ? real.create_cq(context, cqe, cq_context, channel, comp_vector)
                        : absent<ibv_cq*>(nullptr);
}

__attribute__((visibility("default"))) int crux_destroy_cq(ibv_cq* cq) {
  if (hooks) return hooks->destroy_cq(&real, cq);
  return real.destroy_cq ? real.destroy_cq(cq) : absent(ENOSYS);
}

__attribute__((visibility("default"))) ibv_qp* crux_create_qp(ibv_pd* pd,
                                                              ibv_qp_init_attr* attributes) {
  if (hooks) return hooks->create_qp(&real, pd, attributes);
  return real.create_qp ? real.create_qp(pd, attributes) : absent<ibv_qp*>(nullptr);
}

__attribute__((visibility("default"))) int crux_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes,
                                                          int mask) {
  if (hooks) return hooks->modify_qp(&real, qp, attributes, mask);
  return real.modify_qp ? real.modify_qp(qp, attributes, mask) : absent(ENOSYS);
}

__attribute__((visibility("default"))) int crux_destroy_qp(ibv_qp* qp) {
  if (hooks) return hooks->destroy_qp(&real, qp);
  return real.destroy_qp ? real.destroy_qp(qp) : absent(ENOSYS);
}

}  // extern "C"

__asm__(".symver crux_open_device,ibv_open_device@@IBVERBS_1.1");
__asm__(".symver crux_close_device,ibv_close_device@@IBVERBS_1.1");
__asm__(".symver crux_create_cq,ibv_create_cq@@IBVERBS_1.1");
__asm__(".symver crux_destroy_cq,ibv_destroy_cq@@IBVERBS_1.1");
__asm__(".symver crux_create_qp,ibv_create_qp@@IBVERBS_1.1");
__asm__(".symver crux_modify_qp,ibv_modify_qp@@IBVERBS_1.1");
__asm__(".symver crux_destroy_qp,ibv_destroy_qp@@IBVERBS_1.1");
