// The semaphore of one link of a host, in shared memory: a table of the processes that cross it,
// and a word to wait on.
//
// Each process writes its own place in the table alone, and each word of it by one atomic store: no
// death, at whatever instruction, leaves something half written. A place belongs to whoever holds
// the kernel's lock on its byte of the file (an open-file-description lock). It goes with the
// process that dies, seen from any PID namespace, and no number can be taken for another's.
// docs/pcie.md has the protocol and why it can't deadlock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "link_file.h"

namespace crux {

// One process in a link's table.
struct Holder {
  int pid = 0;              // in its own PID namespace
  int level = -1;           // -1: takes no part in the order
  uint32_t operations = 0;  // in flight, or waiting here
  int64_t changed_ns = 0;   // CLOCK_MONOTONIC of the last change of `operations`
  bool same_job = false;    // as the one that asks
};

class LinkTable {
 public:
  static constexpr size_t kPlaces = 127;
  // How late a wait notices a death, which wakes nobody.
  static constexpr int64_t kLookAgainNs = 10'000'000;

  // Takes a place in the table of the link, and makes its file in `folder` where there is none.
  // `job` is not 0; operations of one job never wait for each other. Throws std::runtime_error: the
  // file belongs to somebody else, can be opened by others, has another layout, or is full.
  LinkTable(const std::string& folder, const std::string& cluster, std::string link, uint64_t job);
  ~LinkTable();
  LinkTable(const LinkTable&) = delete;
  LinkTable& operator=(const LinkTable&) = delete;

  const std::string& link() const noexcept { return link_; }
  const std::string& path() const noexcept { return file_.path(); }

  // Whose operations go first, by rank_at(); 0: nobody waits for this process, nor it for anybody.
  void set_rank(uint32_t rank) noexcept;
  // The higher level goes first, of one level the higher priority: a semaphore has as many ranks as
  // there are jobs, however few levels a network has. No level (-1) is rank 0.
  static uint32_t rank_at(int level, double priority) noexcept;
  // One more operation of this process is in flight here, or waits here.
  void mark() noexcept;
  void unmark() noexcept;

  // Whether an operation of another job and a higher rank is here that has given a sign of life
  // within `patience_ns`, and this job isn't exempt.
  bool hindered(int64_t patience_ns) noexcept;
  // Sleeps until this process may be hindered no longer, not past `until_ns`; then ask again.
  void sleep(int64_t until_ns, int64_t patience_ns) noexcept;
  // No operation of this job waits here until then.
  void exempt_until(int64_t time_ns) noexcept;

  // Whether another job has a place too.
  bool shared() noexcept;
  std::vector<Holder> holders();

  // Takes no part any more, and removes the file where nobody else does. Operations in flight may
  // still be unmarked. Undone by rejoin(), which fails where the file was removed.
  void retire() noexcept;
  bool rejoin(uint64_t job) noexcept;

 private:
  struct alignas(64) Place {
    std::atomic<uint64_t> job{0};   // 0: takes no part
    std::atomic<uint64_t> busy{0};  // rank << 32 | operations
    std::atomic<int64_t> changed_ns{0};
    std::atomic<int64_t> exempt_until_ns{0};
    std::atomic<int32_t> pid{0};
  };
  struct alignas(64) Head {
    std::atomic<uint64_t> layout{0};
    std::atomic<uint32_t> used{0};     // places from here on were never taken
    std::atomic<uint32_t> waiting{0};  // whether somebody may sleep on `turn`
    std::atomic<uint32_t> turn{0};     // the futex
  };
  // As the kernel makes it, all zeros, it is a table that nobody is in.
  struct Table {
    Head head;
    std::array<Place, kPlaces> places;
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  static_assert(sizeof(Table) == 8192, "two pages");

  size_t used() const noexcept;
  bool alive(size_t place) const noexcept;
  bool hinders(size_t place, int64_t now_ns, int64_t patience_ns) noexcept;
  bool exempt(int64_t now_ns) const noexcept;
  void sweep(size_t place) noexcept;
  void wake() noexcept;

  const std::string link_;
  LinkFile file_;
  Table* const table_;
  const size_t own_;
  Place& place_;
  // Locks of this process on the file do not exclude each other.
  std::mutex sweeping_;
};

}  // namespace crux
