// This thread is inside this library.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cerrno>

namespace crux::transport {

// State of a thread before it came in.
struct Outside {
  sigset_t signals;
  int cancelling;
  int error;
  bool is_inside;  // a library that this one calls has called back: the call goes straight through
};

// In the static block of the thread: reading it never allocates.
inline thread_local bool inside __attribute__((tls_model("initial-exec"))) = false;

// Until leave() no signal handler runs on this thread, and the thread can't be cancelled. So a
// handler that calls connect() never meets a lock that its own thread holds, and no handler jumps
// out from here. It never lasts over a call of the program that may block.
inline Outside enter() {
  Outside outside;
  outside.error = errno;
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &outside.signals);
  ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &outside.cancelling);
  outside.is_inside = inside;
  inside = true;
  return outside;
}

// errno is again what it was.
inline void leave(const Outside& outside) {
  inside = outside.is_inside;
  ::pthread_sigmask(SIG_SETMASK, &outside.signals, nullptr);
  errno = outside.error;
  ::pthread_setcancelstate(outside.cancelling, nullptr);
}

class Inside {
 public:
  Inside() : outside_(enter()) {}
  ~Inside() { leave(outside_); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  const Outside outside_;
};

// Keeps the thread from being cancelled, and no more, in calls of a device, which may take long. A
// cancelled thread must not unwind through this library, whose unwinder is linked in and another
// one than libc's.
class Uncancelled {
 public:
  Uncancelled() { ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~Uncancelled() { ::pthread_setcancelstate(before_, nullptr); }
  Uncancelled(const Uncancelled&) = delete;
  Uncancelled& operator=(const Uncancelled&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace crux::transport
