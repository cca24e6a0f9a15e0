// libcrux_ibverbs.so: a template. crux_torch/apply/verbs_shim.py makes a stand-in for the installed
// libibverbs from it, for any release and without a compiler.
//
// Each copy gets the SONAME that callers ask for, a DT_NEEDED with the absolute path of the real
// library, and the real library's version nodes. Symbols that are not defined here resolve in the
// real library. It is built without the C++ library, because every process of a job loads it.
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

#include "standin_abi.h"

namespace {

// The copy overwrites these: the real library's path, a string table, version definitions.
struct Room {
  char magic[16];
  char real_path[4080];
  char tables[61440];
};
// volatile: the compiler must not assume that the copy has the same content.
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
  // DT_NEEDED has mapped it already. It is opened by path, because this library may have its
  // SONAME.
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    fprintf(stderr, "crux: the real libibverbs (%s) can't be found: %s\n", path, dlerror());
    return;
  }
  find(library, "ibv_close_device", "IBVERBS_1.1", real.close_device);
  find(library, "ibv_create_qp", "IBVERBS_1.1", real.create_qp);
  find(library, "ibv_modify_qp", "IBVERBS_1.1", real.modify_qp);
  find(library, "ibv_destroy_qp", "IBVERBS_1.1", real.destroy_qp);
  find(library, "ibv_query_gid", "IBVERBS_1.1", real.query_gid);
  const bool whole =
      real.close_device && real.create_qp && real.modify_qp && real.destroy_qp && real.query_gid;
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

// They have names of their own, because <infiniband/verbs.h> defines some real names as macros.
extern "C" {

__attribute__((visibility("default"))) int crux_close_device(ibv_context* context) {
  if (hooks) return hooks->close_device(&real, context);
  return real.close_device ? real.close_device(context) : absent(-1);
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

__asm__(".symver crux_close_device,ibv_close_device@@IBVERBS_1.1");
__asm__(".symver crux_create_qp,ibv_create_qp@@IBVERBS_1.1");
__asm__(".symver crux_modify_qp,ibv_modify_qp@@IBVERBS_1.1");
__asm__(".symver crux_destroy_qp,ibv_destroy_qp@@IBVERBS_1.1");
