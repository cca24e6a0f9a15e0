// An instant that is known only by its earliest and its latest time.
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

// The instant between the two times that is nearest to `predicted`. Its error is at most the
// prediction's, unless the two exclude the whole prediction. Then the two count, because the clocks
// of the prediction have drifted apart.
inline Instant between(int64_t earliest_ns, int64_t latest_ns, const Instant& predicted) noexcept {
  const int64_t ns = std::clamp(predicted.ns, earliest_ns, latest_ns);
  const int64_t first_ns = std::max(earliest_ns, predicted.ns - predicted.error_ns);
  const int64_t last_ns = std::min(latest_ns, predicted.ns + predicted.error_ns);
  if (first_ns > last_ns) return {ns, std::max(ns - earliest_ns, latest_ns - ns)};
  return {ns, std::max(ns - first_ns, last_ns - ns)};
}

}  // namespace crux
