#include "recorder.h"

#include <utility>

namespace crux {

void Recorder::drain(size_t max, std::vector<Record>& out) {
  const std::lock_guard<std::mutex> lock(drain_mutex_);
  Record record;
  for (size_t n = 0; n < max && ring_.pop(record); ++n) out.push_back(record);
}

uint32_t Recorder::add_group(Group group) {
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  groups_.push_back(std::move(group));
  return static_cast<uint32_t>(groups_.size() - 1);
}

void Recorder::rename_group(uint32_t index, std::string name, std::vector<int64_t> ranks) {
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  groups_.at(index).name = std::move(name);
  if (!ranks.empty()) groups_.at(index).ranks = std::move(ranks);
}

std::vector<Group> Recorder::groups() const {
  const std::lock_guard<std::mutex> lock(groups_mutex_);
  return groups_;
}

}  // namespace crux
