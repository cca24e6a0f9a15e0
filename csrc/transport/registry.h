// The TCP connections of this process, by descriptor.
#pragma once

#include <dirent.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "address.h"
#include "crux_transport.h"
#include "tcp_socket.h"

namespace crux::transport {

using Name = std::array<char, CRUX_NAME_CHARS>;

inline Name to_name(const char* text) {
  Name name{};
  std::memcpy(name.data(), text, std::min(std::strlen(text), name.size() - 1));
  return name;
}

// The options of a socket that this library sets.
struct SocketOptions {
  int tos = -1;                    // -1: could not be read
  uint64_t rate_Bps = UINT64_MAX;  // UINT64_MAX: could not be read
};

// A connection as far as this library knows it; the rest comes from the kernel.
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

namespace internal {

// The current descriptor of each socket of this process.
inline std::unordered_map<uint64_t, int> descriptors_by_inode() {
  std::unordered_map<uint64_t, int> found;
  const auto close = [](DIR* dir) { ::closedir(dir); };
  const std::unique_ptr<DIR, decltype(close)> dir(::opendir("/proc/self/fd"), close);
  if (dir == nullptr) return found;
  while (const dirent* entry = ::readdir(dir.get())) {
    char* end = nullptr;
    const long fd = std::strtol(entry->d_name, &end, 10);
    if (end == entry->d_name || *end != '\0') continue;
    if (const auto inode = socket_inode(static_cast<int>(fd))) {
      found.emplace(*inode, static_cast<int>(fd));
    }
  }
  return found;
}

inline crux_connection to_connection(int fd, const Record& record) {
  crux_connection out{};
  out.id = record.inode;
  out.kind = CRUX_TCP;
  out.how = record.how;
  out.error = record.error;
  out.fd = fd;
  std::copy(record.owner.begin(), record.owner.end(), out.owner);
  record.peer.address.write(out.peer, sizeof out.peer);
  out.peer_port = record.peer.port;
  out.dscp = -1;
  out.accepted = record.accepted;
  out.probes = record.probes;
  out.via_ttl = record.via_ttl;
  if (record.via_ttl != 0) record.via.write(out.via, sizeof out.via);
  return out;
}

}  // namespace internal

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

  void add(int fd, const Record& record) {
    Slot* const at = slot(fd, true);
    if (at == nullptr) return;
    const std::lock_guard hold(mutex_);
    *at = Slot{++writes_, record};
  }
  // True if `fd` is still the recorded connection `inode`.
  bool has(int fd, uint64_t inode) const {
    const std::lock_guard hold(mutex_);
    return find(fd, inode) != nullptr;
  }
  // The options before the first change; `now` if there was none.
  SocketOptions original(int fd, uint64_t inode, const SocketOptions& now) const {
    const std::lock_guard hold(mutex_);
    const Slot* const at = find(fd, inode);
    return at == nullptr || at->record.how == CRUX_UNTOUCHED ? now : at->record.original;
  }
  // Notes that a live connection was changed, with 0 or the errno. Adds it if it was not recorded.
  void set_live(int fd, uint64_t inode, const Endpoint& peer, const SocketOptions& before,
                int error) {
    Slot* const at = slot(fd, true);
    if (at == nullptr) return;
    const std::lock_guard hold(mutex_);
    if (at->record.inode != inode) {
      *at = Slot{++writes_, {}};
      at->record.inode = inode;
      at->record.peer = peer;
    }
    if (at->record.how == CRUX_UNTOUCHED) at->record.original = before;
    at->record.how = error == 0 ? CRUX_LIVE_OPTION : CRUX_REFUSED;
    at->record.error = error;
  }
  // The open connections, as the kernel describes them now. Drops the records of closed ones. Finds
  // a connection whose descriptor was duplicated and closed.
  std::vector<crux_connection> list() {
    std::vector<crux_connection> open;
    std::unordered_map<uint64_t, int> moved;
    bool looked = false;
    for (const Known& known : snapshot()) {
      int fd = known.fd;
      Descriptor socket = borrow(fd, known.record.inode);
      if (!socket && errno == ENOENT) {
        drop(fd, known.record.inode);
        if (!looked) {
          moved = internal::descriptors_by_inode();
          looked = true;
        }
        const auto found = moved.find(known.record.inode);
        if (found == moved.end()) continue;
        fd = found->second;
        socket = borrow(fd, known.record.inode);
        if (socket) move(fd, known.record);
      }
      crux_connection out = internal::to_connection(fd, known.record);
      if (socket && describe(socket.get(), out)) open.push_back(out);
    }
    return open;
  }

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
  Slot* slot(int fd, bool make) const {
    if (fd < 0 || fd >= kMaxDescriptors) return nullptr;
    std::atomic<Block*>& known = blocks_[fd / kBlockSlots];
    Block* block = known.load(std::memory_order_acquire);
    if (block == nullptr && make) {
      // Never unmapped. It is zero, and untouched pages cost nothing.
      void* const memory = ::mmap(nullptr, sizeof(Block), PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) return nullptr;
      if (known.compare_exchange_strong(block, static_cast<Block*>(memory))) {
        block = static_cast<Block*>(memory);
      } else {
        ::munmap(memory, sizeof(Block));
      }
    }
    return block == nullptr ? nullptr : &block->slots[fd % kBlockSlots];
  }
  // The slot of `fd` if it holds `inode`, else null; with the lock held.
  Slot* find(int fd, uint64_t inode) const {
    Slot* const at = slot(fd, false);
    return at != nullptr && at->record.inode == inode ? at : nullptr;
  }
  std::vector<Known> snapshot() const {
    std::vector<Known> known;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const Block* const block = blocks_[i].load(std::memory_order_acquire);
      if (block == nullptr) continue;
      known.reserve(known.size() + kBlockSlots);
      const std::lock_guard hold(mutex_);
      for (size_t k = 0; k < kBlockSlots; ++k) {
        const Record& record = block->slots[k].record;
        if (record.inode != 0) known.push_back({static_cast<int>(i * kBlockSlots + k), record});
      }
    }
    return known;
  }
  void drop(int fd, uint64_t inode) {
    const std::lock_guard hold(mutex_);
    if (Slot* const at = find(fd, inode)) at->record.inode = 0;
  }
  void move(int fd, const Record& record) {
    Slot* const at = slot(fd, true);
    if (at == nullptr) return;
    uint64_t before = 0;
    {
      const std::lock_guard hold(mutex_);
      before = at->written;
    }
    // If the number is ours now, whoever gets it next writes to the slot later than this.
    if (socket_inode(fd) != record.inode) return;
    const std::lock_guard hold(mutex_);
    if (at->written == before) *at = Slot{++writes_, record};
  }

  // Held for a few loads and stores only: over no call of the kernel, nor of the heap, whose lock
  // a thread may hold while its signal handler waits for this one.
  mutable std::mutex mutex_;
  uint64_t writes_ = 0;
  mutable std::array<std::atomic<Block*>, kMaxDescriptors / kBlockSlots> blocks_{};
};

}  // namespace crux::transport
