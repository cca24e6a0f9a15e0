// Finds the communicator of a queue pair. A communicator has its own traffic class (NCCL's
// trafficClass), its label, which arrives in the address vector of each of its queue pairs.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>

#include "../registry.h"

namespace crux::transport::verbs {

struct Label {
  Name owner{};
  int dscp = -1;  // on the wire; -1: the label's own
};

class Labels {
 public:
  void set(uint8_t traffic_class, const Label& label) {
    const std::lock_guard lock(mutex_);
    labels_[traffic_class] = label;
  }
  std::optional<Label> find(uint8_t traffic_class) const {
    const std::lock_guard lock(mutex_);
    return labels_[traffic_class];
  }

 private:
  mutable std::mutex mutex_;
  std::array<std::optional<Label>, 256> labels_;
};

}  // namespace crux::transport::verbs
