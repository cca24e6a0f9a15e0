#include "violations.h"

#include <dlfcn.h>

namespace fake_gpu {
namespace {

thread_local int script_calls = 0;

std::string library_of(const void* address) {
  Dl_info info = {};
  if (!dladdr(address, &info) || !info.dli_fname) return "unknown";
  return info.dli_fname;
}

std::string file_name(const std::string& path) {
  const auto slash = path.find_last_of('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

// Python's bindings, the reducer of DDP and the like call on the script's behalf.
bool is_script(const std::string& library) {
  static const std::string own = library_of(reinterpret_cast<const void*>(&is_script));
  const std::string file = file_name(library);
  for (const char* known : {"libtorch", "libc10", "python", "libpython"}) {
    if (file.rfind(known, 0) == 0) return true;
  }
  return library == own || library.find("/torch/_C.") != std::string::npos;
}

}  // namespace

Violations& Violations::instance() {
  static auto* const violations = new Violations;
  return *violations;
}

void Violations::add(const std::string& kind, const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  list_.push_back({kind, what});
}

std::vector<Violation> Violations::list() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return list_;
}

void Violations::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  list_.clear();
  calls_.clear();
}

void Violations::call(const std::string& method, const void* return_address,
                      const std::string& forbidden) {
  const std::string library = library_of(return_address);
  const bool script = script_calls > 0 || is_script(library);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_[{method, script ? "script" : file_name(library)}];
  }
  if (!script && !forbidden.empty()) add(forbidden, method + " called by " + file_name(library));
}

std::map<std::pair<std::string, std::string>, int64_t> Violations::calls() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

ScriptCall::ScriptCall() { ++script_calls; }
ScriptCall::~ScriptCall() { --script_calls; }

}  // namespace fake_gpu
