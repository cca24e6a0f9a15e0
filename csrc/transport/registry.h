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

// The options of a socket that this library sets.
struct SocketOptions {
  int tos = -1;                    // -1: could not be read
  uint64_t rate_Bps = UINT64_MAX;  // UINT64_MAX: could not be read
};

// What this library knows about a connection; the rest comes from the kernel.
struct Record {
  uint64_t inode = 0;  // names the connection together with its descriptor
  Endpoint peer;
  Name owner{};
  bool accepted = false;
  crux_how how = CRUX_UNTOUCHED;
  int error = 0;
  SocketOptions original;  // valid if `how` says that it was changed
  uint32_t probes = 0;
  int via_ttl = 0;
  Address via;
};

// A descriptor has at most one record, and the next connection overwrites it. So a program that
// connects and closes all day does not fill the memory. Writing a record does not use the heap,
// because connect() may be called where malloc() may not.
//
// It lives in memory that a child finds zeroed (wiped.h), because inherited connections stay the
// parent's. Every call is made inside (inside.h).
class Registry {
 public:
  // Descriptors above this are not recorded.
  static constexpr int kMaxDescriptors = 1 << 20;

  void add(int fd, const Record& record);
  // Whether `fd` is still the recorded connection `inode`.
  bool has(int fd, uint64_t inode) const;
  // The options before the first change; `now` if there was none.
  SocketOptions original(int fd, uint64_t inode, const SocketOptions& now) const;
  // Notes that a live connection was changed, with 0 or the errno. Adds it if it was not recorded.
  void set_live(int fd, uint64_t inode, const Endpoint& peer, const SocketOptions& before,
                int error);
  // The open connections, as the kernel describes them now. Drops the records of closed ones. Finds
  // a connection whose descriptor was duplicated and closed.
  std::vector<crux_connection> list();

 private:
  struct Slot {
    uint64_t written;  // the number of the last write to it; 0: none
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

  // Null if there is none, or if there is no memory to `make` it.
  Slot* slot(int fd, bool make) const;
  // The slot of `fd` if it holds `inode`, else null; with the lock held.
  Slot* find(int fd, uint64_t inode) const;
  std::vector<Known> snapshot() const;
  void drop(int fd, uint64_t inode);
  void move(int fd, const Record& record);

  // Held for a few loads and stores only: over no call of the kernel, nor of the heap, whose lock
  // a thread may hold while its signal handler waits for this one.
  mutable std::mutex mutex_;
  uint64_t writes_ = 0;
  mutable std::array<std::atomic<Block*>, kMaxDescriptors / kBlockSlots> blocks_{};
};

}  // namespace crux::transport
