#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace crux::schedule {

// Links that were touched, ascending. A bit for each link there is: to sort them takes longer.
class LinkSet {
 public:
  explicit LinkSet(std::size_t links) : words_((links + kBits - 1) / kBits) {}

  void add(std::int32_t link) {
    const auto number = static_cast<std::uint32_t>(link);
    words_[number / kBits] |= std::uint64_t{1} << (number % kBits);
  }

  // Gives each to `take` and empties the set.
  template <class Take>
  void drain(const Take& take) {
    for (std::size_t w = 0; w < words_.size(); ++w) {
      for (std::uint64_t left = std::exchange(words_[w], 0); left != 0; left &= left - 1) {
        take(static_cast<std::int32_t>(w * kBits) + __builtin_ctzll(left));
      }
    }
  }

 private:
  static constexpr std::size_t kBits = 64;
  std::vector<std::uint64_t> words_;
};

}  // namespace crux::schedule
