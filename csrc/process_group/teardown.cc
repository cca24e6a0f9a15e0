#include "teardown.h"

#include <Python.h>
#include <pthread.h>

#include <cstring>
#include <thread>
#include <utility>

namespace crux {
namespace {

// Lets go of the GIL for its lifetime, where this thread holds it.
class GilRelease {
 public:
  GilRelease() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~GilRelease() {
    if (state_) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Whether this is one of the threads that a ProcessGroupGloo joins when it is destroyed.
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
