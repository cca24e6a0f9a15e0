// The semaphore of one PCIe link of a host, in shared memory: a table of the processes that cross
// it, and a word to wait on.
//
// Each process writes only its own place in the table, and each word by one atomic store. So a
// process that dies at any instruction leaves nothing half written. A place belongs to the process
// that holds the kernel's lock on its byte of the file (an open-file-description lock). The kernel
// releases the lock when the process dies, whatever its PID namespace, and no PID can be mistaken
// for another. docs/understand/host.md has the protocol and explains why it can't deadlock.
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
  // Longest time until a wait notices that a process died, since that wakes nobody.
  static constexpr int64_t kLookAgainNs = 10'000'000;

  // Takes a place in the table of the link, and creates its file in `folder` if there is none.
  // `job` is not 0; operations of one job never wait for each other. Throws std::runtime_error: the
  // file belongs to somebody else, can be opened by others, has another layout, or is full.
  LinkTable(const std::string& folder, const std::string& cluster, std::string link, uint64_t job);
  ~LinkTable();
  LinkTable(const LinkTable&) = delete;
  LinkTable& operator=(const LinkTable&) = delete;

  const std::string& link() const noexcept { return link_; }
  const std::string& path() const noexcept { return file_.path(); }
  // True if the file was cut short: then nobody else is seen here, and nobody sees this process.
  bool lost() const noexcept { return file_.lost(); }

  // The order in which operations go, by rank_at(). 0: nobody waits for this process, and it waits
  // for nobody.
  void set_rank(uint32_t rank) noexcept;
  // The higher level goes first, and within a level the higher priority. So a semaphore has as many
  // ranks as there are jobs, even if the network has few levels. No level (-1) is rank 0.
  static uint32_t rank_at(int level, double priority) noexcept;
  // One more operation of this process is in flight here, or waits here.
  void mark() noexcept;
  void unmark() noexcept;

  // True if an operation of another job and a higher rank is here that has given a sign of life
  // within `patience_ns`, and this job isn't exempt.
  bool hindered(int64_t patience_ns) noexcept;
  // True if another job of a higher rank has a place, so that it may come to be in the way.
  bool outranked() const noexcept;
  // Sleeps until nobody may be in the way any more, at most until `until_ns`; then ask again.
  void sleep(int64_t until_ns, int64_t patience_ns) noexcept;
  // Until then no operation of this job waits here.
  void exempt_until(int64_t time_ns) noexcept;

  // True if another job has a place.
  bool shared() noexcept;
  std::vector<Holder> holders();

  // Leaves the order, and removes the file if nobody else is in it. Operations in flight may still
  // be unmarked. rejoin() undoes it, and fails if the file was removed.
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
    std::atomic<uint32_t> waiting{0};  // 1: somebody may sleep on `turn`
    std::atomic<uint32_t> turn{0};     // the futex
  };
  // All zeros, as the kernel makes a new file, is a table that nobody is in.
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
  bool another_job(size_t place) const noexcept;
  bool alive_or_swept(size_t place) noexcept;
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
