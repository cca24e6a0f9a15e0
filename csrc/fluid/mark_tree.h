#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace crux::fluid {

// Keys of a filling's links and transfers, and the lowest of them. A filling moves a hundred keys
// for each time that it asks for the lowest, so a move only keeps lower bounds of groups of keys:
// they are made exact on the way to the lowest key. Equal keys come out in the order of their
// leaves.
class MarkTree {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  MarkTree() { clear(); }

  void clear() {
    owners_.clear();
    depth_ = 1;
    levels_[0].assign(kGroup, kNever);
  }

  // Adds a leaf at kNever and returns its number.
  std::uint32_t add(std::uint32_t owner) {
    if (owners_.size() == levels_[0].size()) grow();
    owners_.push_back(owner);
    return static_cast<std::uint32_t>(owners_.size() - 1);
  }

  double key(std::uint32_t leaf) const { return levels_[0][leaf]; }

  void set(std::uint32_t leaf, double key) {
    std::size_t at = leaf;
    levels_[0][at] = key;
    for (std::size_t level = 1; level < depth_; ++level) {
      at /= kGroup;
      if (levels_[level][at] <= key) return;
      levels_[level][at] = key;
    }
  }

  // The first leaf of the lowest key; of a leaf that was never added if there is none below kNever.
  std::uint32_t lowest_leaf() {
    for (;;) {
      std::size_t level = depth_ - 1;
      std::size_t at = lowest_of(level, 0);
      while (level > 0) {
        const std::size_t child = lowest_of(level - 1, at);
        if (levels_[level - 1][child] != levels_[level][at]) {
          levels_[level][at] = levels_[level - 1][child];
          break;
        }
        at = child;
        --level;
      }
      if (level == 0) return static_cast<std::uint32_t>(at);
    }
  }
  std::uint32_t owner(std::uint32_t leaf) const { return owners_[leaf]; }

 private:
  static constexpr std::size_t kGroup = 16;
  static constexpr std::size_t kMostLevels = 9;  // enough for 32-bit leaves, and whole groups

  // The first of the lowest entries of a group of a level.
  std::size_t lowest_of(std::size_t level, std::size_t group) const {
    const double* keys = levels_[level].data() + group * kGroup;
#ifdef __SSE2__
    const auto load = [keys](int i) { return _mm_loadu_pd(keys + 2 * i); };
    const auto least = [&load](int i) {
      return _mm_min_pd(_mm_min_pd(load(i), load(i + 1)), _mm_min_pd(load(i + 2), load(i + 3)));
    };
    const __m128d two = _mm_min_pd(least(0), least(4));
    const __m128d lowest = _mm_min_pd(two, _mm_shuffle_pd(two, two, 1));
    // Which one it is can't be predicted, so a search would cost more: two bits a key.
    const auto equal = [&load, lowest](int i) {
      return _mm_packs_epi32(_mm_castpd_si128(_mm_cmpeq_pd(load(i), lowest)),
                             _mm_castpd_si128(_mm_cmpeq_pd(load(i + 1), lowest)));
    };
    const auto bits = [&equal](int i) {
      return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(equal(i), equal(i + 2))));
    };
    const unsigned all = bits(0) | bits(4) << 16;
    return group * kGroup + static_cast<std::size_t>(__builtin_ctz(all)) / 2;
#else
    std::array<double, 4> least = {keys[0], keys[1], keys[2], keys[3]};
    for (std::size_t i = 4; i < kGroup; i += 4) {
      for (std::size_t k = 0; k < 4; ++k) least[k] = std::min(least[k], keys[i + k]);
    }
    const double lowest = std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
    // Which one it is can't be predicted, so a search would cost more.
    unsigned equal = 0;
    for (unsigned i = 0; i < kGroup; ++i) equal |= unsigned{keys[i] == lowest} << i;
    return group * kGroup + static_cast<std::size_t>(__builtin_ctz(equal));
#endif
  }

  // One more group of leaves, and of each level that has none for it.
  void grow() {
    std::size_t groups = levels_[0].size() / kGroup;
    levels_[0].resize(levels_[0].size() + kGroup, kNever);
    for (std::size_t level = 1;; ++level) {
      if (level == depth_) {
        ++depth_;
        levels_[level].assign(kGroup, kNever);
        levels_[level][0] = levels_[level - 1][lowest_of(level - 1, 0)];
      }
      if (groups < levels_[level].size()) return;
      groups = levels_[level].size() / kGroup;
      levels_[level].resize(levels_[level].size() + kGroup, kNever);
    }
  }

  std::array<std::vector<double>, kMostLevels> levels_;  // a group's bound is one entry above it
  std::size_t depth_ = 1;
  std::vector<std::uint32_t> owners_;
};

}  // namespace crux::fluid
