// The file behind the table of a PCIe link, in a folder of a user or of a group, and the kernel's
// locks on its bytes.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>

namespace crux {

// Survives another program that cuts a file short which is mapped here.
//
// The kernel sends SIGBUS to whoever touches a page that its file no longer has. While a range is
// watched, such a fault puts empty memory of this process alone in place of the whole range, and
// the access goes on. All other faults go to the handler that was there before.
class BusGuard {
 public:
  static constexpr size_t kRanges = 256;

  // Throws std::runtime_error if too many are watched, or the handler can't be set.
  BusGuard(void* memory, size_t size);
  ~BusGuard();
  BusGuard(const BusGuard&) = delete;
  BusGuard& operator=(const BusGuard&) = delete;

  // True if the range is no longer the file's.
  bool lost() const noexcept;

 private:
  size_t range_;
};

class LinkFile {
 public:
  // FOLDER/CLUSTER~LINK
  static std::string path_of(const std::string& folder, const std::string& cluster,
                             const std::string& link);
  // Opens the file, or makes it with `size` bytes of zeros, and maps it. It is as open as its
  // folder: to its user (0600), or to the folder's group, too (0660). Throws std::runtime_error if
  // others can open it or use the folder, or if it has another size.
  LinkFile(const std::string& folder, const std::string& cluster, const std::string& link,
           size_t size);
  ~LinkFile();
  LinkFile(const LinkFile&) = delete;
  LinkFile& operator=(const LinkFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  void* memory() const noexcept { return memory_; }
  // True if somebody cut the file short, so that memory() is this process's alone.
  bool lost() const noexcept { return guard_ && guard_->lost(); }

  // Locks of this process on one byte, until unlock() or its end. Those of one LinkFile don't
  // exclude each other.
  bool try_lock(size_t byte) const noexcept;
  void unlock(size_t byte) const noexcept;
  // True if another process holds it, or the kernel can't tell.
  bool locked_elsewhere(size_t byte) const noexcept;

  // Removes the file if no other process uses it; then use() fails.
  void disuse() noexcept;
  bool use() noexcept;

  // Around a fork, no file is being opened or closed. The child closes all open ones. Otherwise it
  // would keep its parent's locks, because a lock belongs to the open file.
  static void before_fork() noexcept;
  static void after_fork_in_parent() noexcept;
  static void after_fork_in_child() noexcept;

 private:
  // False if another process removes or makes the file now.
  bool open_checked(size_t size);
  // False if the name is taken.
  bool make(int folder, const char* name, mode_t mode, gid_t group);
  void map(size_t size);
  void close() noexcept;

  const std::string folder_;
  const std::string path_;
  const size_t size_;
  int descriptor_ = -1;
  void* memory_ = nullptr;
  std::optional<BusGuard> guard_;
};

}  // namespace crux
