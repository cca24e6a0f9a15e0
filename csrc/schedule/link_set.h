#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace crux::schedule {

// Links that were touched, ascending. A bit for each link there is, since to sort them takes
// longer, and a bit for each word of these that has any, since a job touches few of the links of a
// large network.
class LinkSet {
 public:
  explicit LinkSet(std::size_t links)
      : words_(words_for(links)), filled_(words_for(words_.size())) {}

  void add(std::int32_t link) {
    const auto number = static_cast<std::uint32_t>(link);
    const std::uint32_t word = number / kBits;
    words_[word] |= std::uint64_t{1} << (number % kBits);
    filled_[word / kBits] |= std::uint64_t{1} << (word % kBits);
  }

  // Gives each to `take` and empties the set.
  template <class Take>
  void drain(const Take& take) {
    drain(filled_, 0, filled_.size(), [&](std::size_t word) {
      drain(words_, word, word + 1,
            [&](std::size_t link) { take(static_cast<std::int32_t>(link)); });
    });
  }

 private:
  static constexpr std::size_t kBits = 64;

  static std::size_t words_for(std::size_t bits) { return (bits + kBits - 1) / kBits; }

  template <class Take>
  static void drain(std::vector<std::uint64_t>& words, std::size_t begin, std::size_t end,
                    const Take& take) {
    for (std::size_t w = begin; w < end; ++w) {
      for (std::uint64_t left = std::exchange(words[w], 0); left != 0; left &= left - 1) {
        take(w * kBits + static_cast<std::size_t>(__builtin_ctzll(left)));
      }
    }
  }

  std::vector<std::uint64_t> words_;
  std::vector<std::uint64_t> filled_;
};

}  // namespace crux::schedule
