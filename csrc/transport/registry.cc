#include "registry.h"

#include <dirent.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "tcp_socket.h"

namespace crux::transport {
namespace {

// The current descriptor of each socket of this process.
std::unordered_map<uint64_t, int> descriptors_by_inode() {
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

crux_connection to_connection(int fd, const Record& record) {
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

}  // namespace

Name to_name(const char* text) {
  Name name{};
  std::strncpy(name.data(), text, name.size() - 1);
  return name;
}

void Registry::add(int fd, const Record& record) {
  Slot* const at = slot(fd, true);
  if (at == nullptr) return;
  const std::lock_guard hold(mutex_);
  *at = Slot{++writes_, record};
}

bool Registry::has(int fd, uint64_t inode) const {
  const std::lock_guard hold(mutex_);
  return find(fd, inode) != nullptr;
}

SocketOptions Registry::original(int fd, uint64_t inode, const SocketOptions& now) const {
  const std::lock_guard hold(mutex_);
  const Slot* const at = find(fd, inode);
  return at == nullptr || at->record.how == CRUX_UNTOUCHED ? now : at->record.original;
}

void Registry::set_live(int fd, uint64_t inode, const Endpoint& peer, const SocketOptions& before,
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

std::vector<crux_connection> Registry::list() {
  std::vector<crux_connection> open;
  std::unordered_map<uint64_t, int> moved;
  bool looked = false;
  for (const Known& known : snapshot()) {
    int fd = known.fd;
    Descriptor socket = borrow(fd, known.record.inode);
    if (!socket && errno == ENOENT) {
      drop(fd, known.record.inode);
      if (!looked) {
        moved = descriptors_by_inode();
        looked = true;
      }
      const auto found = moved.find(known.record.inode);
      if (found == moved.end()) continue;
      fd = found->second;
      socket = borrow(fd, known.record.inode);
      if (socket) move(fd, known.record);
    }
    crux_connection out = to_connection(fd, known.record);
    if (socket && describe(socket.get(), out)) open.push_back(out);
  }
  return open;
}

void Registry::move(int fd, const Record& record) {
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

Registry::Slot* Registry::find(int fd, uint64_t inode) const {
  Slot* const at = slot(fd, false);
  return at != nullptr && at->record.inode == inode ? at : nullptr;
}

Registry::Slot* Registry::slot(int fd, bool make) const {
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

std::vector<Registry::Known> Registry::snapshot() const {
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

void Registry::drop(int fd, uint64_t inode) {
  const std::lock_guard hold(mutex_);
  if (Slot* const at = find(fd, inode)) at->record.inode = 0;
}

}  // namespace crux::transport
