// Errors on demand, for tests: CRUX_TRANSPORT_FAULT="rtr:7,repost:3" lets every 7th transition to
// RTR and every 3rd receive that is given back fail. Nothing without it.
#pragma once

#include <array>
#include <atomic>
#include <string>

namespace crux::transport::verbs {

// The steps of a change of a live queue pair.
enum class Step { kDrain, kQuery, kReset, kInit, kRepost, kRtr, kRts, kCount };

const char* step_name(Step step);

class Faults {
 public:
  // Replaces what was there. False for a text that can't be read; then there are none.
  bool set(const std::string& text);
  // Counts this step; whether it is to fail.
  bool strikes(Step step);

 private:
  static constexpr size_t kSteps = static_cast<size_t>(Step::kCount);
  std::array<std::atomic<unsigned>, kSteps> every_{};  // 0: never
  std::array<std::atomic<unsigned>, kSteps> count_{};
};

// Of this process, from the environment.
Faults& faults();

}  // namespace crux::transport::verbs
