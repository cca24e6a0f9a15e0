// Threads that must not hold the GIL, or can't get it any more.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

namespace crux {

// Releases the GIL for its lifetime, if this thread holds it.
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

// Runs `destroy`, which drops inner backends, on a thread where their destructors can finish.
//
// A ProcessGroupGloo joins its threads when it is destroyed. Those threads drop the tensors of
// operations and may need the GIL for that, so the caller must not hold it meanwhile. Python's
// garbage collector may also run on one of those threads and destroy the backend there. A thread
// can't join itself, so `destroy` then runs on a new thread.
inline void tear_down(std::function<void()> destroy) {
  char thread[16] = {};
  const bool is_named = pthread_getname_np(pthread_self(), thread, sizeof(thread)) == 0;
  if (is_named && std::strncmp(thread, "pt_gloo", std::strlen("pt_gloo")) == 0) {
    std::thread(std::move(destroy)).detach();
    return;
  }
  const GilRelease release;
  destroy();
}

inline constexpr unsigned kParked_s = 60;

// To be called by the thread that is about to end Python, at most once. Another thread that comes
// back from a call of C++ afterwards does not get the GIL: Python ends it by unwinding its stack,
// which pybind11's bindings don't let pass, so the process would abort. From now on such a thread
// stays where it is until the process has ended; not forever, because the end may wait for it.
inline void park_late_threads() noexcept {
  static pthread_t ending_thread;
  static std::terminate_handler handler_before;
  ending_thread = pthread_self();
  handler_before = std::set_terminate([] {
    const bool unwound_by_python = !Py_IsInitialized() && !std::current_exception() &&
                                   pthread_equal(pthread_self(), ending_thread) == 0;
    for (unsigned left_s = unwound_by_python ? kParked_s : 0; left_s > 0;) left_s = sleep(left_s);
    handler_before();
    std::abort();
  });
}

}  // namespace crux
