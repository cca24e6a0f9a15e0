// What someone did that NCCL, CUDA or c10d forbids, and who called what of a communicator's
// handles. No torch in here.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fake_gpu {

struct Violation {
  std::string kind;
  std::string what;
};

class Violations {
 public:
  static Violations& instance();

  void add(const std::string& kind, const std::string& what);
  std::vector<Violation> list() const;
  void clear();

  // Counts a call of `method`; `return_address` tells which library made it. Where the caller is
  // neither Python, torch nor this library and `forbidden` is not empty, it is a violation of that
  // kind, unless the script says that it is its own (ScriptCall).
  void call(const std::string& method, const void* return_address, const std::string& forbidden);
  // Calls by method and the caller's library.
  std::map<std::pair<std::string, std::string>, int64_t> calls() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Violation> list_;
  std::map<std::pair<std::string, std::string>, int64_t> calls_;
};

// Within it, calls that come through a backend under test are made for the script, which asked for
// them by a handle of that backend.
class ScriptCall {
 public:
  ScriptCall();
  ~ScriptCall();
  ScriptCall(const ScriptCall&) = delete;
  ScriptCall& operator=(const ScriptCall&) = delete;
};

}  // namespace fake_gpu
