// Connections between the ranks of a communicator, and moving bytes over several at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

namespace cuda_rig {

struct Move {
  int fd;
  void* data;
  size_t bytes;
  bool sends;
};

// Does all of them; those of one connection and direction in their order. False once a peer is
// gone or `aborted` is set.
bool transfer(std::vector<Move> moves, const std::atomic<bool>& aborted);

// Listens on the interface that NCCL_SOCKET_IFNAME names, or on the loopback.
class Listener {
 public:
  Listener();
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  // -1 once `aborted` is set.
  int accept(const std::atomic<bool>& aborted) const;

  struct Address {
    unsigned ip = 0;
    unsigned short port = 0;
  };
  const Address& address() const { return address_; }

 private:
  int fd_;
  Address address_;
};

// -1 where nobody listens.
int dial(const Listener::Address& address);

}  // namespace cuda_rig
