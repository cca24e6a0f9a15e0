// Counts the operators that run, by shape, beside the dispatcher: no kernel changes.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace crux {

// Calls of one operator that ran with equal arguments.
struct OperatorCalls {
  std::string name;
  // Tensors are stand-ins without data, except vectors of integers: formulas read lengths in them.
  std::vector<c10::IValue> inputs;
  // Names of the last inputs, which are keyword-only.
  std::vector<std::string> keywords;
  std::vector<c10::IValue> outputs;
  bool on_cuda = false;
  int64_t times = 0;
};

// An operator that was not noted with its arguments, nor was anything in it, and who called it.
struct OtherOperator {
  std::string name, overload, caller, caller_overload;
};

struct OperatorCount {
  std::vector<OperatorCalls> calls;
  std::vector<OtherOperator> others;
};

// Begins to note the operators of this thread, and of autograd's threads for it. One count at a
// time.
//
// An operator of `counted` is noted with its arguments, and nothing that it calls. If it calls
// itself (autocast's casts, for one), those calls count in its place. Operators are passed over if
// somebody else decides what runs: dispatch modes, subclasses of Tensor, torch.func. What these run
// in the end is noted.
//
// `found` is called in this thread before a counted operator runs outside autograd's backward.
void begin_operators(std::unordered_set<std::string> counted, std::function<void()> found);

// Ends the count. Called in another thread than `begin_operators`, it leaves a callback there,
// which does nothing.
OperatorCount end_operators();

}  // namespace crux
