// RecordFunction has a member more without NDEBUG than in torch, which is built with it.
#ifndef NDEBUG
#error "crux_torch must be compiled with -DNDEBUG, as torch is"
#endif

#include "operator_count.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>

#include "../process.h"
#include "../process_group/cuda.h"

namespace crux {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;

// Calls with other arguments than all before are kept up to so many.
constexpr size_t kMostCalls = 1 << 16;

struct Operator {
  std::string name, overload;
  bool counted = false;
  std::vector<std::string> keywords;
};

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603u;
    for (const int64_t value : key) hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211u;
    return hash ^ (hash >> 32);
  }
};

struct Count {
  std::mutex mutex;
  uint32_t generation = 0;
  uint64_t number = 0;
  std::thread::id thread;
  std::unordered_set<std::string> counted;
  std::function<void()> found;
  // By the address of the name in the operator's schema. Other events have names of their own, and
  // none of these addresses.
  std::unordered_map<const char*, Operator> operators;
  std::unordered_map<Key, OperatorCalls, KeyHash> calls;
  std::set<std::pair<const Operator*, const Operator*>> others;
};

// An operator that runs in this thread.
struct Frame {
  const Operator* op;
  OperatorCalls* calls = nullptr;
  bool handed_on = false;
  bool replaced = false;
  bool has_counted = false;
  // Index of the frame that counted when this one began.
  ptrdiff_t outer = -1;
};

struct Stack {
  uint64_t number = 0;
  std::vector<Frame> frames;
  ptrdiff_t counting = -1;
  bool busy = false;
  Key key;
};

std::atomic<Count*> active{nullptr};
thread_local Stack stack;
thread_local at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, visit);
  }
}

// True if the operator's kernel comes later, in a call that is seen as well, or never.
bool is_handed_on(Inputs inputs) {
  static const c10::DispatchKeySet again({
      c10::DispatchKey::Python,
      c10::DispatchKey::Functionalize,
      c10::DispatchKey::Batched,
      c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
      c10::DispatchKey::FuncTorchDynamicLayerBackMode,
  });
  c10::DispatchKeySet keys;
  for (const c10::IValue& input : inputs) {
    each_tensor(input, [&](const at::Tensor& tensor) { keys = keys | tensor.key_set(); });
  }
  const auto local = c10::impl::tls_local_dispatch_key_set();
  keys = (keys | local.included_) - local.excluded_;
  return keys.has_any(again) || keys.has_backend(c10::BackendComponent::MetaBit);
}

bool has_nested(Inputs inputs) {
  bool found = false;
  for (const c10::IValue& input : inputs) {
    each_tensor(input, [&](const at::Tensor& tensor) { found = found || tensor.is_nested(); });
  }
  return found;
}

bool is_captured(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return false;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  return is_capturing(guard.getStream(tensor.device()));
}

// Its values may be read when the count ends; in a capture it has none yet.
bool holds_lengths(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.dim() == 1 && (type == at::kInt || type == at::kLong) && !is_captured(tensor);
}

void describe(const c10::IValue& value, Key& key) {
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& tensor = value.toTensor();
    key.insert(key.end(), {1, static_cast<int64_t>(tensor.scalar_type()),
                           static_cast<int64_t>(tensor.device().type()), tensor.dim()});
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
    if (holds_lengths(tensor)) {
      key.push_back(reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl()));
    }
  } else if (value.isInt()) {
    key.insert(key.end(), {2, value.toInt()});
  } else if (value.isBool()) {
    key.insert(key.end(), {3, value.toBool()});
  } else if (value.isDouble()) {
    int64_t bits = 0;
    const double number = value.toDouble();
    std::memcpy(&bits, &number, sizeof bits);
    key.insert(key.end(), {4, bits});
  } else if (value.isList()) {
    const auto items = value.toListRef();
    key.insert(key.end(), {5, static_cast<int64_t>(items.size())});
    for (const c10::IValue& item : items) describe(item, key);
  } else {
    key.push_back(6);
  }
}

c10::IValue stand_in(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& tensor = value.toTensor();
    if (holds_lengths(tensor)) return tensor;
    return at::Tensor(at::detail::empty_meta(tensor.sizes(), tensor.scalar_type()));
  }
  if (!value.isList()) return value;
  std::vector<c10::IValue> items;
  for (const c10::IValue& item : value.toListRef()) items.push_back(stand_in(item));
  return c10::ivalue::Tuple::create(std::move(items));
}

std::vector<c10::IValue> stand_ins(Inputs values) {
  std::vector<c10::IValue> made;
  for (const c10::IValue& value : values) made.push_back(stand_in(value));
  return made;
}

const Operator& operator_of(Count& count, const at::RecordFunction& function) {
  const auto [place, is_new] = count.operators.try_emplace(function.name());
  Operator& op = place->second;
  if (!is_new) return op;
  const auto name = function.operator_name();
  if (!name) return op;
  op.name = name->name;
  op.overload = name->overload_name;
  op.counted = count.counted.count(op.name) != 0;
  if (!op.counted) return op;
  const auto schema = function.operator_schema();
  for (const auto& argument : schema->arguments()) {
    if (argument.kwarg_only()) op.keywords.push_back(argument.name());
  }
  return op;
}

// The place of this call among those that are kept; null if there are too many.
OperatorCalls* calls_of(Count& count, const Operator& op, Inputs inputs) {
  stack.key.assign(1, reinterpret_cast<int64_t>(&op));
  for (const c10::IValue& input : inputs) describe(input, stack.key);
  const auto known = count.calls.find(stack.key);
  if (known != count.calls.end()) return &known->second;
  if (count.calls.size() >= kMostCalls) return nullptr;
  OperatorCalls calls;
  calls.name = op.name;
  calls.inputs = stand_ins(inputs);
  calls.keywords = op.keywords;
  bool first = true;
  for (const c10::IValue& input : inputs) {
    each_tensor(input, [&](const at::Tensor& tensor) {
      if (first) calls.on_cuda = tensor.is_cuda();
      first = false;
    });
  }
  return &count.calls.emplace(stack.key, std::move(calls)).first->second;
}

// Returns true for a call of the script's own, false for one of backward.
bool begin(Count& count, const at::RecordFunction& function) {
  const std::lock_guard<std::mutex> lock(count.mutex);
  if (active.load() != &count) return false;
  if (stack.number != count.number) {
    stack.number = count.number;
    stack.frames.clear();
    stack.counting = -1;
  }
  const Operator& op = operator_of(count, function);
  Frame frame{&op};
  frame.outer = stack.counting;
  const bool inside = stack.counting >= 0;
  const auto inputs = function.inputs();
  if (!inside || stack.frames[stack.counting].op->name == op.name) {
    frame.handed_on = is_handed_on(inputs);
    if (op.counted && !frame.handed_on && !has_nested(inputs)) {
      if (inside) stack.frames[stack.counting].replaced = true;
      frame.calls = calls_of(count, op, inputs);
      stack.counting = static_cast<ptrdiff_t>(stack.frames.size());
    }
  }
  stack.frames.push_back(frame);
  return frame.calls && !inside && std::this_thread::get_id() == count.thread;
}

void end(Count& count, const at::RecordFunction& function) {
  const std::lock_guard<std::mutex> lock(count.mutex);
  if (active.load() != &count || stack.number != count.number || stack.frames.empty()) return;
  const Frame frame = stack.frames.back();
  stack.frames.pop_back();
  stack.counting = frame.outer;
  Frame* const caller = stack.frames.empty() ? nullptr : &stack.frames.back();
  bool counts = frame.has_counted;
  // Without outputs it raised.
  const auto& outputs = function.outputs();
  if (frame.calls && !frame.replaced && !outputs.empty()) {
    counts = true;
    if (frame.calls->times++ == 0)
      frame.calls->outputs = stand_ins(Inputs(outputs.data(), outputs.size()));
  }
  if (caller) caller->has_counted = caller->has_counted || counts;
  if (counts || frame.handed_on || frame.calls || frame.outer >= 0 || frame.op->name.empty())
    return;
  count.others.emplace(frame.op, caller ? caller->op : nullptr);
}

// The one of this process, if it counts.
Count* counting() {
  Count* const count = active.load();
  return count && !stack.busy && count->generation == fork_generation() ? count : nullptr;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  Count* const count = counting();
  if (!count) return nullptr;
  stack.busy = true;
  try {
    if (begin(*count, function) && !torch::autograd::get_current_node()) count->found();
  } catch (...) {
    // Nothing of this reaches the operator.
  }
  stack.busy = false;
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  Count* const count = counting();
  if (!count) return;
  stack.busy = true;
  try {
    end(*count, function);
  } catch (...) {
  }
  stack.busy = false;
}

// Never destroyed: autograd's threads may still run while the process exits.
Count& process_count() {
  static Count* count = nullptr;
  if (!count || count->generation != fork_generation()) {
    count = new Count;
    count->generation = fork_generation();
  }
  return *count;
}

}  // namespace

void begin_operators(std::unordered_set<std::string> counted, std::function<void()> found) {
  (void)end_operators();
  Count& count = process_count();
  {
    const std::lock_guard<std::mutex> lock(count.mutex);
    ++count.number;
    count.thread = std::this_thread::get_id();
    count.counted = std::move(counted);
    count.found = std::move(found);
  }
  if (handle == at::INVALID_CALLBACK_HANDLE) {
    handle = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                            .needsInputs(true)
                                            .needsOutputs(true)
                                            .scopes({at::RecordScope::FUNCTION}));
  }
  active = &count;
}

OperatorCount end_operators() {
  if (handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle);
  handle = at::INVALID_CALLBACK_HANDLE;
  Count& count = process_count();
  active = nullptr;
  OperatorCount ended;
  const std::lock_guard<std::mutex> lock(count.mutex);
  for (auto& [key, calls] : count.calls) {
    if (calls.times) ended.calls.push_back(std::move(calls));
  }
  for (const auto& [op, caller] : count.others) {
    ended.others.push_back(
        {op->name, op->overload, caller ? caller->name : "", caller ? caller->overload : ""});
  }
  count.calls.clear();
  count.others.clear();
  count.operators.clear();
  count.found = nullptr;
  return ended;
}

}  // namespace crux
