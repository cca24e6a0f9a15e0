#include "link_table.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "../process.h"

namespace crux {
namespace {

// Changes whenever something changes that two processes must agree on.
constexpr uint64_t kLayout = 0x6372'7578'6c6b'0001;  // "cruxlk", 1

constexpr uint32_t rank_of(uint64_t busy) noexcept { return static_cast<uint32_t>(busy >> 32); }
constexpr int kPriorityBits = 24;
constexpr int kMaxLevel = 126;
constexpr uint32_t operations_of(uint64_t busy) noexcept { return static_cast<uint32_t>(busy); }

// Returns at once if the word is not `expected`; may also return for no reason.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t limit_ns) noexcept {
  timespec limit{};
  limit.tv_sec = limit_ns / 1'000'000'000;
  limit.tv_nsec = limit_ns % 1'000'000'000;
  (void)syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &limit,
                nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  (void)syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
                nullptr, 0);
}

size_t claim(const LinkFile& file) {
  for (size_t place = 0; place < LinkTable::kPlaces; ++place) {
    if (file.try_lock(place)) return place;
  }
  throw std::runtime_error(file.path() + ": all " + std::to_string(LinkTable::kPlaces) +
                           " places are taken");
}

}  // namespace

LinkTable::LinkTable(const std::string& folder, const std::string& cluster, std::string link,
                     uint64_t job)
    : link_(std::move(link)),
      file_(folder, cluster, link_, sizeof(Table)),
      table_(static_cast<Table*>(file_.memory())),
      own_(claim(file_)),
      place_(table_->places[own_]) {
  uint64_t layout = 0;
  if (!table_->head.layout.compare_exchange_strong(layout, kLayout) && layout != kLayout) {
    throw std::runtime_error(file_.path() +
                             ": has another layout: made by another release of Crux?");
  }
  // The last holder of the place left these.
  place_.busy.store(0);
  place_.exempt_until_ns.store(0);
  place_.pid.store(getpid());
  place_.job.store(job);
  uint32_t used = table_->head.used.load();
  while (used <= own_ && !table_->head.used.compare_exchange_weak(used, own_ + 1)) {
  }
}

LinkTable::~LinkTable() {
  retire();
  place_.busy.store(0);
}

uint32_t LinkTable::rank_at(int level, double priority) noexcept {
  if (level < 0) return 0;
  // A positive float's bits are in its order; these are its exponent and 16 bits after the point.
  constexpr double kMost = std::numeric_limits<float>::max();
  const float positive = priority > 0 ? static_cast<float>(std::min(priority, kMost)) : 0.0F;
  uint32_t bits = 0;
  std::memcpy(&bits, &positive, sizeof bits);
  return (static_cast<uint32_t>(std::min(level, kMaxLevel)) + 1) << kPriorityBits |
         bits >> (31 - kPriorityBits);
}

void LinkTable::set_rank(uint32_t rank) noexcept {
  uint64_t busy = place_.busy.load();
  while (!place_.busy.compare_exchange_weak(busy, uint64_t{rank} << 32 | operations_of(busy))) {
  }
  if (rank != rank_of(busy)) wake();
}

void LinkTable::mark() noexcept {
  // Before the count, so that nobody sees the new operation with an old time.
  place_.changed_ns.store(monotonic_ns(), std::memory_order_relaxed);
  place_.busy.fetch_add(1);
}

void LinkTable::unmark() noexcept {
  place_.changed_ns.store(monotonic_ns(), std::memory_order_relaxed);
  uint64_t busy = place_.busy.load();
  do {
    if (operations_of(busy) == 0) return;
  } while (!place_.busy.compare_exchange_weak(busy, busy - 1));
  if (operations_of(busy) == 1) wake();
}

void LinkTable::wake() noexcept {
  // A waiter reads `turn`, announces that it waits, and then looks who is here. This is done in the
  // reverse order: a waiter that announced itself before this exchange finds another turn, and one
  // that announces itself later sees the change.
  if (table_->head.waiting.load() == 0 || table_->head.waiting.exchange(0) == 0) return;
  table_->head.turn.fetch_add(1);
  futex_wake_all(table_->head.turn);
}

void LinkTable::sleep(int64_t until_ns, int64_t patience_ns) noexcept {
  const uint32_t turn = table_->head.turn.load();
  table_->head.waiting.store(1);
  if (!hindered(patience_ns)) return;
  const int64_t left_ns = until_ns - monotonic_ns();
  if (left_ns > 0) futex_wait(table_->head.turn, turn, std::min(left_ns, kLookAgainNs));
}

size_t LinkTable::used() const noexcept {
  return std::min<size_t>(table_->head.used.load(std::memory_order_acquire), kPlaces);
}

bool LinkTable::alive(size_t place) const noexcept {
  return place == own_ || file_.locked_elsewhere(place);
}

bool LinkTable::hindered(int64_t patience_ns) noexcept {
  const uint32_t rank = rank_of(place_.busy.load());
  if (rank == 0) return false;
  for (size_t place = 0; place < used(); ++place) {
    const uint64_t busy = table_->places[place].busy.load();
    if (rank_of(busy) <= rank || operations_of(busy) == 0) continue;
    const int64_t now_ns = monotonic_ns();
    if (hinders(place, now_ns, patience_ns)) return !exempt(now_ns);
  }
  return false;
}

bool LinkTable::outranked() const noexcept {
  const uint32_t rank = rank_of(place_.busy.load());
  if (rank == 0) return false;
  for (size_t place = 0; place < used(); ++place) {
    if (another_job(place) && rank_of(table_->places[place].busy.load()) > rank) return true;
  }
  return false;
}

bool LinkTable::hinders(size_t place, int64_t now_ns, int64_t patience_ns) noexcept {
  const Place& other = table_->places[place];
  if (!another_job(place)) return false;
  // Not as a difference, which overflows for a time that nobody can have written in earnest.
  if (other.changed_ns.load(std::memory_order_relaxed) <= now_ns - patience_ns) return false;
  return alive_or_swept(place);
}

bool LinkTable::another_job(size_t place) const noexcept {
  const uint64_t job = table_->places[place].job.load();
  return job != 0 && job != place_.job.load();
}

// Clears the place of a process that has died.
bool LinkTable::alive_or_swept(size_t place) noexcept {
  if (alive(place)) return true;
  const std::unique_lock<std::mutex> only(sweeping_, std::try_to_lock);
  // Locked, so that nobody takes the place meanwhile.
  if (!only || !file_.try_lock(place)) return false;
  table_->places[place].job.store(0);
  table_->places[place].busy.store(0);
  file_.unlock(place);
  return false;
}

void LinkTable::exempt_until(int64_t time_ns) noexcept {
  place_.exempt_until_ns.store(time_ns);
  wake();
}

bool LinkTable::exempt(int64_t now_ns) const noexcept {
  const uint64_t job = place_.job.load();
  for (size_t place = 0; place < used(); ++place) {
    const Place& one = table_->places[place];
    if (one.job.load() == job && one.exempt_until_ns.load() > now_ns) return true;
  }
  return false;
}

bool LinkTable::shared() noexcept {
  for (size_t place = 0; place < used(); ++place) {
    if (another_job(place) && alive_or_swept(place)) return true;
  }
  return false;
}

std::vector<Holder> LinkTable::holders() {
  std::vector<Holder> found;
  for (size_t place = 0; place < used(); ++place) {
    const Place& one = table_->places[place];
    const uint64_t job = one.job.load();
    if (job == 0 || !alive(place)) continue;
    const uint64_t busy = one.busy.load();
    found.push_back({one.pid.load(), static_cast<int>(rank_of(busy) >> kPriorityBits) - 1,
                     operations_of(busy), one.changed_ns.load(), job == place_.job.load()});
  }
  return found;
}

void LinkTable::retire() noexcept {
  place_.job.store(0);
  set_rank(0);
  file_.disuse();
}

bool LinkTable::rejoin(uint64_t job) noexcept {
  if (!file_.use()) return false;
  place_.job.store(job);
  return true;
}

}  // namespace crux
