// Memory that a child finds zeroed, whether fork(), _Fork() or clone() made it.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

namespace crux::transport {

// Zeroed, in a child again. Throws std::bad_alloc.
void* map_wiped(size_t size);
void unmap_wiped(void* memory, size_t size);

// A T of which the child of this process gets a new one. So a lock that another thread of the
// parent held is free in the child, and nobody has to take locks before a fork, which a signal
// handler may do at any moment. Zeroed memory has to be a T: that of new std::mutex and std::atomic
// is.
template <class T>
class Wiped {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  Wiped() : it_(new (map_wiped(sizeof(T))) T()) {}
  ~Wiped() { unmap_wiped(it_, sizeof(T)); }
  Wiped(const Wiped&) = delete;
  Wiped& operator=(const Wiped&) = delete;

  T* operator->() const { return it_; }
  T& operator*() const { return *it_; }

 private:
  T* const it_;
};

}  // namespace crux::transport
