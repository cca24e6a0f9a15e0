// Whether this thread is already inside this library.
#pragma once

namespace crux::transport {

// A signal handler, or a library that this one calls, may call connect() while this thread is
// inside a call or holds a lock. Then the call goes straight through.
class Guard {
 public:
  Guard() : outermost_(depth_++ == 0) {}
  ~Guard() { --depth_; }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  bool outermost() const { return outermost_; }
  static bool inside() { return depth_ > 0; }

 private:
  // In the static block of the thread: reading it never allocates.
  static inline thread_local int depth_ __attribute__((tls_model("initial-exec"))) = 0;
  bool outermost_;
};

}  // namespace crux::transport
