#include "repeat.h"

#include <cmath>

namespace crux::fluid {

bool same(const Phase& a, const Phase& b, double tolerance_s) {
  return a.stage == b.stage && a.burst == b.burst &&
         std::abs(a.elapsed_s - b.elapsed_s) <= tolerance_s &&
         std::abs(a.pending_s - b.pending_s) <= tolerance_s;
}

}  // namespace crux::fluid
