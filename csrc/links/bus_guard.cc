#include "bus_guard.h"

#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace crux {
namespace {

struct Range {
  std::atomic<bool> taken{false};
  std::atomic<uintptr_t> begin{0};  // 0: not watched
  std::atomic<size_t> size{0};
  std::atomic<bool> lost{false};
};

std::array<Range, BusGuard::kRanges> ranges;
struct sigaction before{};

// Also while another thread maps or unmaps: a range that is watched is mapped.
bool replace(uintptr_t at) noexcept {
  for (Range& range : ranges) {
    const uintptr_t begin = range.begin.load();
    const size_t size = range.size.load();
    if (begin == 0 || at < begin || at - begin >= size) continue;
    const int error = errno;
    void* const made = mmap(reinterpret_cast<void*>(begin), size, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    errno = error;
    if (made == MAP_FAILED) return false;
    range.lost.store(true);
    return true;
  }
  return false;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const bool is_fault = info->si_code > 0;  // not sent by kill()
  if (is_fault && replace(reinterpret_cast<uintptr_t>(info->si_addr))) return;
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else if (is_fault || before.sa_handler == SIG_DFL) {
    // The access that is repeated, or the signal that is sent again, ends the process.
    (void)sigaction(SIGBUS, &before, nullptr);
    if (!is_fault) (void)raise(SIGBUS);
  }
}

void install() {
  static const int error = [] {
    struct sigaction ours{};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    // Read first: the handler may run as soon as it is set.
    if (sigaction(SIGBUS, nullptr, &before) != 0) return errno;
    return sigaction(SIGBUS, &ours, nullptr) == 0 ? 0 : errno;
  }();
  if (error != 0) throw std::runtime_error(std::string("sigaction: ") + std::strerror(error));
}

}  // namespace

BusGuard::BusGuard(void* memory, size_t size) : range_(0) {
  install();
  while (range_ < kRanges && ranges[range_].taken.exchange(true)) ++range_;
  if (range_ == kRanges) throw std::runtime_error("too many files are mapped");
  ranges[range_].lost.store(false);
  ranges[range_].size.store(size);
  ranges[range_].begin.store(reinterpret_cast<uintptr_t>(memory));
}

BusGuard::~BusGuard() {
  ranges[range_].begin.store(0);
  ranges[range_].taken.store(false);
}

bool BusGuard::lost() const noexcept { return ranges[range_].lost.load(); }

}  // namespace crux
