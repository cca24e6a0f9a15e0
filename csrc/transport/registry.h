// The TCP connections of this process, by descriptor.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "address.h"
#include "crux_transport.h"

namespace crux::transport {

using Name = std::array<char, CRUX_NAME_CHARS>;

Name to_name(const char* text);

// What of a socket this library sets.
struct SocketOptions {
  int tos = -1;                    // -1: could not be read
  uint64_t rate_Bps = UINT64_MAX;  // UINT64_MAX: could not be read
};

// What is known of a connection beyond what the kernel tells of it.
struct Record {
  uint64_t inode = 0;  // names the connection together with its descriptor
  Endpoint peer;
  Name owner{};
  bool accepted = false;
  crux_how how = CRUX_UNTOUCHED;
  int error = 0;
  SocketOptions original;  // where `how` says that it was touched
  uint32_t probes = 0;
  int via_ttl = 0;
  Address via;
};

// A descriptor has one record at most, so whoever closes and connects all day fills no memory: the
// next connection takes the place of the last. Writing a record allocates nothing from the heap,
// as connect() may be called where malloc() may not.
class Registry {
 public:
  // Descriptors above this are not recorded.
  static constexpr int kMaxDescriptors = 1 << 20;

  void add(int fd, const Record& record);
  // Whether `fd` still stands for a recorded connection `inode`.
  bool has(int fd, uint64_t inode) const;
  // What the connection had before it was first touched; `now` where it never was.
  SocketOptions original(int fd, uint64_t inode, const SocketOptions& now) const;
  // A live connection was set: 0 or the errno. It is recorded from then on if it was not.
  void set_live(int fd, uint64_t inode, const Endpoint& peer, const SocketOptions& before,
                int error);
  // The connections that are open, asked of the kernel now. Records of others are dropped; one
  // whose descriptor was duplicated and closed is found again.
  std::vector<crux_connection> list();

  // Around fork(); forget() in the child, whose inherited connections stay its parent's.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void forget();

 private:
  struct Slot {
    uint64_t generation;  // 0: never used
    Record record;
  };
  static constexpr int kBlockSlots = 1024;
  struct Block {
    std::array<Slot, kBlockSlots> slots;
  };
  struct Known {
    int fd;
    Record record;
  };

  Slot* find(int fd, uint64_t inode) const;
  // Null where there is none, or no memory to `make` it.
  Slot* slot(int fd, bool make) const;
  std::vector<Known> snapshot() const;
  void drop(int fd, uint64_t inode);
  void move(int fd, const Record& record);

  mutable std::mutex mutex_;
  uint64_t generation_ = 1;
  mutable std::array<Block*, kMaxDescriptors / kBlockSlots> blocks_{};
};

}  // namespace crux::transport
