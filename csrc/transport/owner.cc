// Whose connections a thread makes.
#include <vector>

#include "transport.h"

namespace crux::transport {
namespace {

// Read by connect(), so in the thread's static block: reading it never allocates.
thread_local const char* innermost __attribute__((tls_model("initial-exec"))) = nullptr;

std::vector<Name>& pushed() {
  thread_local std::vector<Name> names;
  return names;
}

void expose() { innermost = pushed().empty() ? nullptr : pushed().back().data(); }

}  // namespace

const char* current_owner() { return innermost; }

void push_owner(const char* owner) {
  pushed().push_back(to_name(owner));
  expose();
}

void pop_owner() {
  if (!pushed().empty()) pushed().pop_back();
  expose();
}

}  // namespace crux::transport
