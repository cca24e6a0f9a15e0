// An instant of which only an earliest and a latest time are known.
#pragma once

#include <algorithm>
#include <cstdint>

namespace crux {

struct Instant {
  int64_t ns;        // CLOCK_MONOTONIC
  int64_t error_ns;  // how far from `ns` it may have been
};

inline Instant between(int64_t earliest_ns, int64_t latest_ns) noexcept {
  const int64_t ns = earliest_ns + (latest_ns - earliest_ns) / 2;
  return {ns, latest_ns - ns};
}

// The instant that was between the two and, by what was known before, at `predicted`: there, or at
// the nearer of the two. Its error is never more than the prediction's, unless the two exclude all
// that was predicted: then they hold, and the prediction was of clocks that have drifted apart.
inline Instant between(int64_t earliest_ns, int64_t latest_ns, const Instant& predicted) noexcept {
  const int64_t ns = std::clamp(predicted.ns, earliest_ns, latest_ns);
  const int64_t first_ns = std::max(earliest_ns, predicted.ns - predicted.error_ns);
  const int64_t last_ns = std::min(latest_ns, predicted.ns + predicted.error_ns);
  if (first_ns > last_ns) return {ns, std::max(ns - earliest_ns, latest_ns - ns)};
  return {ns, std::max(ns - first_ns, last_ns - ns)};
}

}  // namespace crux
