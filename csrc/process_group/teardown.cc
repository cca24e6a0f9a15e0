#include "teardown.h"

#include <pthread.h>

#include <cstring>
#include <thread>
#include <utility>

#include "gil_release.h"

namespace crux {
namespace {

// Whether this is a thread that a ProcessGroupGloo joins when it is destroyed.
bool is_gloo_thread() {
  char name[16] = {};
  return pthread_getname_np(pthread_self(), name, sizeof(name)) == 0 &&
         std::strncmp(name, "pt_gloo", std::strlen("pt_gloo")) == 0;
}

}  // namespace

void tear_down(std::function<void()> destroy) {
  if (is_gloo_thread()) {
    std::thread(std::move(destroy)).detach();
    return;
  }
  const GilRelease release;
  destroy();
}

}  // namespace crux
