// Sends one SYN whose TTL ends on its way, and tells which router dropped it.
#pragma once

#include <cstdint>

#include "address.h"
#include "tcp_socket.h"

namespace crux::transport {

// The properties that a probe shares with the connection that it is for.
struct ProbedConnection {
  Endpoint local;  // its port does not matter; the address may be any
  Endpoint peer;
  int tos = 0;     // or IPv6 traffic class
  int device = 0;  // interface index that it is bound to, 0 for none
};

// An ordinary non-blocking connect() with a small TTL. The router that drops its SYN reports itself
// in the socket's error queue. This needs no privilege.
class SynProbe {
 public:
  enum class Answer {
    kNone,     // so far
    kHop,      // from() dropped it
    kReached,  // the destination itself answered
    kFailed    // error() was reported
  };

  // Sends it from source port `port`. 0, EADDRINUSE if the port is taken, or the errno of the call
  // that failed.
  int send(const ProbedConnection& connection, uint16_t port, int ttl);
  // For poll(): the answer has arrived when it is readable, writable or in error. -1: no answer is
  // expected.
  int waits_on() const { return answer_ == Answer::kNone ? socket_.get() : -1; }
  void read_answer();
  // Frees the port and keeps the answer.
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
