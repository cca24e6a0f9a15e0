#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace crux::fluid {

// Keys of a filling's links and transfers, and the lowest of them: a binary tree of minima. Unlike
// in a heap, moving a key takes no unpredictable branches. Equal keys come out in the order of
// their leaves.
class MarkTree {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  void clear() {
    owners_.clear();
    leaves_ = kFewestLeaves;
    minima_.assign(2 * leaves_, kNever);
  }

  // Adds a leaf at kNever and returns its number.
  std::uint32_t add(std::uint32_t owner) {
    if (owners_.size() == leaves_) grow();
    owners_.push_back(owner);
    return static_cast<std::uint32_t>(owners_.size() - 1);
  }

  double key(std::uint32_t leaf) const { return minima_[leaves_ + leaf]; }

  void set(std::uint32_t leaf, double key) {
    std::size_t node = leaves_ + leaf;
    minima_[node] = key;
    while (node > 1) {
      node /= 2;
      const double lowest = std::min(minima_[2 * node], minima_[2 * node + 1]);
      if (minima_[node] == lowest) return;
      minima_[node] = lowest;
    }
  }

  double lowest() const { return minima_[1]; }
  std::uint32_t lowest_leaf() const {
    const double lowest = minima_[1];
    std::size_t node = 1;
    while (node < leaves_) node = 2 * node + (minima_[2 * node] == lowest ? 0 : 1);
    return static_cast<std::uint32_t>(node - leaves_);
  }
  std::uint32_t owner(std::uint32_t leaf) const { return owners_[leaf]; }

 private:
  static constexpr std::size_t kFewestLeaves = 16;

  void grow() {
    std::vector<double> minima(4 * leaves_, kNever);
    std::copy(minima_.begin() + static_cast<std::ptrdiff_t>(leaves_), minima_.end(),
              minima.begin() + static_cast<std::ptrdiff_t>(2 * leaves_));
    leaves_ *= 2;
    for (std::size_t node = leaves_ - 1; node > 0; --node) {
      minima[node] = std::min(minima[2 * node], minima[2 * node + 1]);
    }
    minima_ = std::move(minima);
  }

  std::size_t leaves_ = kFewestLeaves;
  std::vector<double> minima_ = std::vector<double>(2 * kFewestLeaves, kNever);
  std::vector<std::uint32_t> owners_;
};

}  // namespace crux::fluid
