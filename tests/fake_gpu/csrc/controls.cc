#include "controls.h"

#include <chrono>
#include <utility>

namespace fake_gpu {

Controls& Controls::instance() {
  static auto* const controls = new Controls;
  return *controls;
}

Settings Controls::settings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settings_;
}

void Controls::set(const Settings& settings) {
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_ = settings;
}

void Controls::inject(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  faults_.push_back(fault);
}

std::vector<Fault> Controls::take(const std::string& op, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Fault> met;
  for (auto fault = faults_.begin(); fault != faults_.end();) {
    const bool meets = (fault->op.empty() || fault->op == op) &&
                       (fault->rank < 0 || fault->rank == rank) && fault->count > 0;
    if (meets) met.push_back(*fault);
    fault = meets && --fault->count == 0 ? faults_.erase(fault) : fault + 1;
  }
  return met;
}

void Controls::release() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++releases_;
    faults_.clear();
  }
  released_.notify_all();
}

uint64_t Controls::holds() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return releases_;
}

void Controls::wait_for_release(uint64_t held, const std::atomic<bool>& aborted) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (releases_ <= held && !aborted) released_.wait_for(lock, std::chrono::milliseconds(5));
}

size_t Controls::log(const Issued& issued) {
  const std::lock_guard<std::mutex> lock(mutex_);
  issued_.push_back(issued);
  return forgotten_ + issued_.size() - 1;
}

void Controls::started(size_t index, int64_t ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= forgotten_) issued_[index - forgotten_].start_ns = ns;
}

void Controls::ended(size_t index, int64_t ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= forgotten_) issued_[index - forgotten_].end_ns = ns;
}

std::vector<Issued> Controls::issued() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return issued_;
}

void Controls::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forgotten_ += issued_.size();
  issued_.clear();
}

}  // namespace fake_gpu
