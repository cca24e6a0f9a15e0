#pragma once

#include <cstddef>

namespace crux::schedule {

// Elements that someone else owns.
template <class T>
class View {
 public:
  View(const T* data, std::size_t size) : data_(data), size_(size) {}

  std::size_t size() const { return size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  const T* data_;
  std::size_t size_;
};

}  // namespace crux::schedule
