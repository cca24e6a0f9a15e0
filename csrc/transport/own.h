// Objects that a child of this process gets anew.
#pragma once

#include <atomic>

#include "wiped.h"

namespace crux::transport {

// This process's T. It is never destroyed; a child leaves its parent's alone, because another
// thread may have held its lock.
template <class T>
T& own() {
  static const Wiped<std::atomic<T*>>& known = *new Wiped<std::atomic<T*>>;
  T* at = known->load();
  if (at != nullptr) return *at;
  // Only for a search for leaks, which does not look into mapped memory.
  static std::atomic<T*> reachable;
  T* const made = new T;
  if (known->compare_exchange_strong(at, made)) {
    reachable.store(made);
    return *made;
  }
  delete made;
  return *at;
}

}  // namespace crux::transport
