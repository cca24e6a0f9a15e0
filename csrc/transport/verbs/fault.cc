#include "fault.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace crux::transport::verbs {
namespace {

constexpr const char* kNames[] = {"drain", "query", "reset", "init", "repost", "rtr", "rts"};

}  // namespace

const char* step_name(Step step) { return kNames[static_cast<size_t>(step)]; }

bool Faults::set(const std::string& text) {
  for (auto& every : every_) every = 0;
  for (auto& count : count_) count = 0;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t colon = word.find(':');
    unsigned every = 0;
    bool known = false;
    if (colon != std::string::npos && std::sscanf(word.c_str() + colon + 1, "%u", &every) == 1) {
      for (size_t i = 0; i < kSteps; ++i) {
        if (word.compare(0, colon, kNames[i]) != 0) continue;
        every_[i] = every;
        known = true;
      }
    }
    if (known) continue;
    for (auto& any : every_) any = 0;
    return false;
  }
  return true;
}

bool Faults::strikes(Step step) {
  const size_t i = static_cast<size_t>(step);
  const unsigned every = every_[i].load(std::memory_order_relaxed);
  return every != 0 && ++count_[i] % every == 0;
}

Faults& faults() {
  static Faults* const instance = [] {
    auto* const made = new Faults;
    const char* const text = ::secure_getenv("CRUX_TRANSPORT_FAULT");
    if (text != nullptr && !made->set(text))
      std::fprintf(stderr, "crux_transport: CRUX_TRANSPORT_FAULT=%s can't be read\n", text);
    return made;
  }();
  return *instance;
}

}  // namespace crux::transport::verbs
