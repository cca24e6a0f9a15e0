#include "link_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace crux {
namespace {

// Each user of the file has a read lock on this byte; the places are the bytes from 0 on.
constexpr off_t kInUse = 1 << 20;
constexpr int kTries = 200;
constexpr std::chrono::milliseconds kPause{1};

// The descriptors that a forked child closes; it may not allocate.
std::array<std::atomic<int>, 256> open_descriptors{};
// Held while a file is opened or closed, until that is noted above, and during a fork.
std::mutex opening;

void note(int descriptor, bool open) noexcept {
  for (auto& cell : open_descriptors) {
    int expected = open ? 0 : descriptor + 1;
    if (cell.compare_exchange_strong(expected, open ? descriptor + 1 : 0)) return;
  }
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error(path + ": " + what);
}

[[noreturn]] void fail_call(const std::string& path, const char* call, int error) {
  fail(path, std::string(call) + ": " + std::strerror(error));
}

struct Descriptor {
  explicit Descriptor(int opened) : number(opened) {}
  ~Descriptor() {
    if (number >= 0) (void)::close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  const int number;
};

struct flock one_byte(short type, off_t byte) noexcept {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  return range;
}

bool lock(int descriptor, short type, off_t byte) noexcept {
  struct flock range = one_byte(type, byte);
  return fcntl(descriptor, F_OFD_SETLK, &range) == 0;
}

// True if the open file still has a name.
bool is_named(int descriptor) noexcept {
  struct stat found{};
  return fstat(descriptor, &found) == 0 && found.st_nlink > 0;
}

struct GuardedRange {
  std::atomic<bool> taken{false};
  std::atomic<uintptr_t> begin{0};  // 0: not watched
  std::atomic<size_t> size{0};
  std::atomic<bool> lost{false};
};

std::array<GuardedRange, BusGuard::kRanges> ranges;
struct sigaction handler_before{};

// Also while another thread maps or unmaps: a range that is watched is mapped.
bool replace_lost(uintptr_t at) noexcept {
  for (GuardedRange& range : ranges) {
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
  if (is_fault && replace_lost(reinterpret_cast<uintptr_t>(info->si_addr))) return;
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) {
    handler_before.sa_sigaction(number, info, context);
  } else if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    handler_before.sa_handler(number);
  } else if (is_fault || handler_before.sa_handler == SIG_DFL) {
    // The access that is repeated, or the signal that is sent again, ends the process.
    (void)sigaction(SIGBUS, &handler_before, nullptr);
    if (!is_fault) (void)raise(SIGBUS);
  }
}

void install_guard() {
  static const int error = [] {
    struct sigaction ours{};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    // Read first: the handler may run as soon as it is set.
    if (sigaction(SIGBUS, nullptr, &handler_before) != 0) return errno;
    return sigaction(SIGBUS, &ours, nullptr) == 0 ? 0 : errno;
  }();
  if (error != 0) throw std::runtime_error(std::string("sigaction: ") + std::strerror(error));
}

}  // namespace

BusGuard::BusGuard(void* memory, size_t size) : range_(0) {
  install_guard();
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

std::string LinkFile::path_of(const std::string& folder, const std::string& cluster,
                              const std::string& link) {
  return folder + "/" + cluster + "~" + link;
}

LinkFile::LinkFile(const std::string& folder, const std::string& cluster, const std::string& link,
                   size_t size)
    : folder_(folder), path_(path_of(folder, cluster, link)), size_(size) {
  if (cluster.empty() || link.empty() ||
      (cluster + link).find_first_of("/~") != std::string::npos) {
    fail(path_, "not a name of a cluster and a link");
  }
  try {
    // Another process may be removing the file, which takes no time.
    for (int tried = 0;; ++tried) {
      if (open_checked(size) && use()) break;
      const int error = errno;
      const bool passing = error == EAGAIN || error == EACCES || error == ESTALE;
      close();
      if (!passing || tried == kTries) fail_call(path_, "F_OFD_SETLK", error);
      std::this_thread::sleep_for(kPause);
    }
    map(size);
    guard_.emplace(memory_, size);
  } catch (...) {
    if (memory_) munmap(memory_, size_);
    close();
    throw;
  }
}

LinkFile::~LinkFile() {
  guard_.reset();
  if (memory_) munmap(memory_, size_);
  close();
}

bool LinkFile::open_checked(size_t size) {
  struct stat folder{}, found{};
  mode_t mode = 0;
  {
    const std::lock_guard<std::mutex> lock(opening);
    const Descriptor in(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (in.number < 0) fail_call(folder_, "open", errno);
    if (fstat(in.number, &folder) != 0) fail_call(folder_, "fstat", errno);
    if (folder.st_mode & S_IRWXO) fail(folder_, "is open to other users: chmod it, or remove it");
    mode = folder.st_mode & S_IRWXG ? 0660 : 0600;
    const char* name = path_.c_str() + folder_.size() + 1;
    descriptor_ = openat(in.number, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (descriptor_ < 0 && errno != ENOENT) fail_call(path_, "open", errno);
    // It gets its name only when it is complete, and none that is taken.
    if (descriptor_ < 0 && !make(in.number, name, mode, folder.st_gid)) return false;
    note(descriptor_, true);
  }
  if (fstat(descriptor_, &found) != 0) fail_call(path_, "fstat", errno);
  if (!S_ISREG(found.st_mode)) fail(path_, "not a regular file");
  const bool shared = mode == 0660;
  if (!shared && found.st_uid != geteuid()) {
    fail(path_, "belongs to user " + std::to_string(found.st_uid) + ", not to this one");
  }
  if (shared && found.st_gid != folder.st_gid) fail(path_, "is not its folder's group's");
  if ((found.st_mode & 07777) != mode)
    fail(path_, shared ? "its mode isn't 0660" : "its mode isn't 0600");
  if (found.st_nlink > 1) fail(path_, "has other names");
  if (found.st_size != 0 && static_cast<size_t>(found.st_size) != size) {
    fail(path_, "has " + std::to_string(found.st_size) + " bytes, not " + std::to_string(size) +
                    ": made by another release of Crux?");
  }
  return true;
}

bool LinkFile::make(int folder, const char* name, mode_t mode, gid_t group) {
  descriptor_ = openat(folder, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
  if (descriptor_ < 0) fail_call(path_, "open", errno);
  const std::string unnamed = "/proc/self/fd/" + std::to_string(descriptor_);
  const char* call = nullptr;
  if (mode != 0600 && fchown(descriptor_, static_cast<uid_t>(-1), group) != 0) {
    call = "fchown";
  } else if (fchmod(descriptor_, mode) != 0) {
    call = "fchmod";
  } else if (linkat(AT_FDCWD, unnamed.c_str(), folder, name, AT_SYMLINK_FOLLOW) != 0) {
    call = "linkat";
  }
  if (call == nullptr) return true;
  const int error = errno;
  (void)::close(descriptor_);
  descriptor_ = -1;
  if (error != EEXIST) fail_call(path_, call, error);
  errno = ESTALE;
  return false;
}

void LinkFile::map(size_t size) {
  // Without backing memory the first access would kill the process.
  const int error = posix_fallocate(descriptor_, 0, static_cast<off_t>(size));
  if (error != 0) fail_call(path_, "posix_fallocate", error);
  memory_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory_ == MAP_FAILED) {
    memory_ = nullptr;
    fail_call(path_, "mmap", errno);
  }
}

void LinkFile::close() noexcept {
  if (descriptor_ < 0) return;
  const std::lock_guard<std::mutex> lock(opening);
  note(descriptor_, false);
  // This also releases its locks.
  (void)::close(descriptor_);
  descriptor_ = -1;
}

bool LinkFile::try_lock(size_t byte) const noexcept {
  return lock(descriptor_, F_WRLCK, static_cast<off_t>(byte));
}

void LinkFile::unlock(size_t byte) const noexcept {
  (void)lock(descriptor_, F_UNLCK, static_cast<off_t>(byte));
}

bool LinkFile::locked_elsewhere(size_t byte) const noexcept {
  struct flock range = one_byte(F_WRLCK, static_cast<off_t>(byte));
  return fcntl(descriptor_, F_OFD_GETLK, &range) != 0 || range.l_type != F_UNLCK;
}

bool LinkFile::use() noexcept {
  if (!lock(descriptor_, F_RDLCK, kInUse)) return false;
  if (is_named(descriptor_)) return true;
  (void)lock(descriptor_, F_UNLCK, kInUse);
  errno = ESTALE;
  return false;
}

void LinkFile::disuse() noexcept {
  // Released first. Otherwise two that leave at the same time would each see the other.
  (void)lock(descriptor_, F_UNLCK, kInUse);
  if (!lock(descriptor_, F_WRLCK, kInUse)) return;
  if (is_named(descriptor_)) (void)unlink(path_.c_str());
  (void)lock(descriptor_, F_UNLCK, kInUse);
}

void LinkFile::before_fork() noexcept { opening.lock(); }

void LinkFile::after_fork_in_parent() noexcept { opening.unlock(); }

void LinkFile::after_fork_in_child() noexcept {
  opening.unlock();
  for (auto& cell : open_descriptors) {
    const int descriptor = cell.exchange(0) - 1;
    if (descriptor >= 0) (void)::close(descriptor);
  }
}

}  // namespace crux
