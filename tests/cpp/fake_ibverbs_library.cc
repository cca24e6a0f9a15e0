// The device in memory as a libibverbs.so.1 of a release that does not exist: with the version
// nodes of fake_ibverbs.map, and the functions that a program needs to connect queue pairs.
#include <cstdlib>

#include "fake_ibverbs.h"

extern "C" {

ibv_device** fake_get_device_list(int* count) {
  auto** const devices = static_cast<ibv_device**>(std::calloc(3, sizeof(ibv_device*)));
  for (int i = 0; i < 2; ++i) devices[i] = fake_verbs::device(i);
  if (count != nullptr) *count = 2;
  return devices;
}
void fake_free_device_list(ibv_device** devices) { std::free(devices); }

ibv_pd* fake_alloc_pd(ibv_context* context) {
  auto* const pd = new ibv_pd{};
  pd->context = context;
  return pd;
}
int fake_dealloc_pd(ibv_pd* pd) {
  delete pd;
  return 0;
}

ibv_context* fake_open_device(ibv_device* device) { return fake_verbs::open_device(device); }
int fake_close_device(ibv_context* context) { return fake_verbs::calls().close_device(context); }
ibv_qp* fake_create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  return fake_verbs::calls().create_qp(pd, attributes);
}
int fake_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  return fake_verbs::calls().modify_qp(qp, attributes, mask);
}
int fake_destroy_qp(ibv_qp* qp) { return fake_verbs::calls().destroy_qp(qp); }
int fake_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  return fake_verbs::calls().query_gid(context, port, index, gid);
}

// For tests, beside verbs.
uint32_t fake_wire_port(uint32_t qp_num) { return fake_verbs::wire(qp_num).udp_port; }
uint32_t fake_wire_class(uint32_t qp_num) { return fake_verbs::wire(qp_num).traffic_class; }
void fake_refuse_flow_labels(int error) { fake_verbs::refuse_flow_labels(error); }
void fake_set_live_port(ibv_qp* qp, uint16_t udp_port) { fake_verbs::set_live_port(qp, udp_port); }

}  // extern "C"

#define VERB(name) __asm__(".symver fake_" #name ",ibv_" #name "@@IBVERBS_1.1")
VERB(get_device_list);
VERB(free_device_list);
VERB(alloc_pd);
VERB(dealloc_pd);
VERB(open_device);
VERB(close_device);
VERB(create_qp);
VERB(modify_qp);
VERB(destroy_qp);
VERB(query_gid);
