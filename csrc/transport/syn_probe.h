// One SYN that dies on its way, and who saw it die.
#pragma once

#include <cstdint>

#include "address.h"
#include "tcp_socket.h"

namespace crux::transport {

// What the probes must have in common with the connection that they stand for.
struct ProbedConnection {
  Endpoint local;  // its port does not matter; the address may be any
  Endpoint peer;
  int tos = 0;     // or IPv6 traffic class
  int device = 0;  // interface index that it is bound to, 0 for none
};

// An ordinary non-blocking connect() with a small TTL: the router that drops its SYN names itself
// in the socket's error queue. No privilege is needed.
class SynProbe {
 public:
  enum class Answer {
    kNone,     // so far
    kHop,      // from() saw it die
    kReached,  // the destination itself answered
    kFailed    // error() was reported
  };

  // Sends it from source port `port`. 0, EADDRINUSE where the port is taken, or the errno of what
  // failed.
  int send(const ProbedConnection& connection, uint16_t port, int ttl);
  // For poll(): the answer is there when it is readable, writable or in error. -1: nothing to wait
  // for.
  int waits_on() const { return answer_ == Answer::kNone ? socket_.get() : -1; }
  void read_answer();
  // Gives the port free; the answer stays.
  void close() { socket_.reset(); }

  Answer answer() const { return answer_; }
  int error() const { return error_; }
  const Address& from() const { return from_; }

 private:
  Descriptor socket_;
  Answer answer_ = Answer::kFailed;
  int error_ = 0;
  Address from_;
};

}  // namespace crux::transport
