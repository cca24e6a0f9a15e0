// This thread is inside this library.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cerrno>

namespace crux::transport {

// While this exists no signal handler runs on this thread, and the thread can't be cancelled. So a
// handler that calls connect() never meets a lock that its own thread holds, and no handler jumps
// out from here. A library that this one calls may call back: then `outermost()` is false, and the
// call goes straight through. errno stays what it was.
//
// It never lasts over a call of the program that may block.
class Inside {
 public:
  Inside() : errno_(errno) {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &signals_);
    ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling_);
    outermost_ = !inside_;
    inside_ = true;
  }
  // A thread that is cancelled asynchronously unwinds from pthread_setcancelstate().
  ~Inside() noexcept(false) {
    if (outermost_) inside_ = false;
    ::pthread_sigmask(SIG_SETMASK, &signals_, nullptr);
    errno = errno_;
    ::pthread_setcancelstate(cancelling_, nullptr);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  bool outermost() const { return outermost_; }

 private:
  // In the static block of the thread: reading it never allocates.
  static inline thread_local bool inside_ __attribute__((tls_model("initial-exec"))) = false;
  int errno_, cancelling_ = PTHREAD_CANCEL_ENABLE;
  sigset_t signals_;
  bool outermost_;
};

}  // namespace crux::transport
