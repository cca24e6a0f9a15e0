// Every operator that torch has for CUDA runs as the CPU's, on the same memory.
//
// What only writes to tensors that it is given is a kernel: it runs later, on the current stream.
// What makes tensors runs at the call, behind what is on the stream; within a capture it runs at
// the call, to learn the shapes, and again whenever the graph is replayed.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <set>

#include "stream.h"

namespace {

using torch::jit::Stack;

// The CPU's view of a tensor's whole storage, so that strides and offsets hold.
at::Tensor on_cpu(const at::Tensor& of) {
  if (!of.defined() || !of.is_cuda()) return of;
  const auto options = of.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  auto found = at::empty({0}, options);
  const c10::Storage& storage = of.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    at::DataPtr(storage.mutable_data(), c10::Device(at::kCPU)), nullptr, false);
  found.unsafeGetTensorImpl()->set_storage_and_dtype(std::move(same), of.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
  if (of.is_conj()) found._set_conj(true);
  if (of.is_neg()) found._set_neg(true);
  return found;
}

// A call with every tensor on the CPU.
struct Call {
  const c10::OperatorHandle op;
  Stack arguments;
  c10::Device device{at::kCUDA, -1};
  // What is written: as the CPU sees it, and as it was given.
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  bool all_on_device = true;

  Call(const c10::OperatorHandle& op, const Stack& given) : op(op) {
    const auto& schema = op.schema();
    const size_t n = schema.arguments().size();
    for (size_t i = 0; i < n; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      arguments.push_back(translated(given[given.size() - n + i], alias && alias->isWrite()));
    }
    if (!device.has_index()) device = c10::Device(at::kCUDA, c10::cuda::current_device());
  }

  at::Tensor translated(const at::Tensor& of, bool is_written) {
    if (!of.defined()) return of;
    if (!of.is_cuda()) {
      // A number is a kernel's argument.
      const bool number = of.dim() == 0 && !is_written;
      all_on_device &= number;
      return number && !of.unsafeGetTensorImpl()->is_wrapped_number() ? of.clone() : of;
    }
    device = of.device();
    // An empty one of an `out` variant is resized, and resize_written() makes it the device's.
    const bool grows = is_written && of.numel() == 0;
    at::Tensor found = grows ? at::empty(of.sizes(), of.options().device(at::kCPU)) : on_cpu(of);
    if (is_written) written.emplace_back(found, of);
    return found;
  }

  c10::IValue translated(const c10::IValue& of, bool is_written) {
    if (of.isTensor()) return translated(of.toTensor(), is_written);
    if (of.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : of.toTensorVector())
        list.push_back(translated(each, is_written));
      return list;
    }
    if (of.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : of.toOptionalTensorVector()) {
        list.push_back(each ? std::optional(translated(*each, is_written)) : std::nullopt);
      }
      return list;
    }
    if (of.isDevice() && of.toDevice().is_cuda()) {
      device = of.toDevice();
      return c10::Device(at::kCPU);
    }
    // The CPU's own, which has the same seed.
    if (of.isGenerator()) return {};
    return of;
  }

  // What the CPU returns.
  Stack run() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    const cuda_rig::Kernel running(device.index());
    Stack stack = arguments;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }

  bool only_writes() const {
    if (written.empty() || !all_on_device) return false;
    for (const auto& [cpu, given] : written) {
      if (given.numel() == 0) return false;
    }
    for (const auto& each : op.schema().returns()) {
      if (!each.alias_info() || !each.alias_info()->isWrite()) return false;
    }
    return true;
  }

  // What is returned as the device's: what was given, or a copy.
  at::Tensor back(const at::Tensor& of) const {
    if (!of.defined() || !of.is_cpu()) return of;
    for (const auto& [cpu, given] : written) {
      if (cpu.is_same(of)) return given;
    }
    at::Tensor made = at::empty_strided(of.sizes(), of.strides(), of.options().device(device));
    if (of.is_conj()) made._set_conj(true);
    if (of.is_neg()) made._set_neg(true);
    on_cpu(made).copy_(of);
    return made;
  }

  // `out` tensors that the CPU made larger.
  void resize_written() const {
    for (const auto& [cpu, given] : written) {
      if (cpu.sizes() == given.sizes()) continue;
      at::Tensor made = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(device));
      on_cpu(made).copy_(cpu);
      const_cast<at::Tensor&>(given).set_(made);
    }
  }
};

template <class Function>
void for_each_tensor(const c10::IValue& of, const Function& function) {
  if (of.isTensor()) function(of.toTensor());
  if (of.isTensorList()) {
    for (const at::Tensor& each : of.toTensorVector()) function(each);
  }
}

c10::IValue back(const Call& call, const c10::IValue& of) {
  if (of.isTensor()) return call.back(of.toTensor());
  if (!of.isTensorList()) return of;
  c10::List<at::Tensor> list;
  for (const at::Tensor& each : of.toTensorVector()) list.push_back(call.back(each));
  return list;
}

// What an operator that makes nothing returns: arguments of its own.
Stack written_arguments(const c10::FunctionSchema& schema, const Stack& given) {
  Stack found;
  const size_t n = schema.arguments().size();
  for (const auto& each : schema.returns()) {
    for (size_t i = 0; i < n; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && *alias == *each.alias_info()) found.push_back(given[given.size() - n + i]);
    }
  }
  TORCH_INTERNAL_ASSERT(found.size() == schema.returns().size());
  return found;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto call = std::make_shared<Call>(op, *stack);
  const c10::DeviceGuard guard(call->device);
  const auto stream = c10::cuda::getCurrentCUDAStream(call->device.index());
  cuda_rig::Stream* const queue = cuda_rig::stream_of(stream.stream());
  bool captured = false;
  {
    const std::lock_guard<std::mutex> lock(cuda_rig::capture_mutex());
    captured = queue->capture != nullptr;
  }
  Stack returned;
  if (call->only_writes()) {
    returned = written_arguments(op.schema(), *stack);
    // Memory belongs to whoever called: freed, it is used again behind this on the same stream.
    call->written.clear();
    queue->enqueue([call] { call->run(); });
  } else {
    if (!captured) queue->synchronize();
    for (const c10::IValue& each : call->run()) returned.push_back(back(*call, each));
    call->resize_written();
    if (captured) {
      std::vector<at::Tensor> made;
      for (const auto& each : returned) {
        for_each_tensor(each, [&](const at::Tensor& t) { made.push_back(on_cpu(t)); });
      }
      queue->enqueue([call, made] {
        size_t next = 0;
        for (const c10::IValue& each : call->run()) {
          for_each_tensor(each, [&](const at::Tensor& t) {
            if (t.defined() && t.unsafeGetTensorImpl() != made[next].unsafeGetTensorImpl()) {
              made[next].copy_(t);
            }
            ++next;
          });
        }
      });
    }
  }
  stack->resize(stack->size() - op.schema().arguments().size());
  for (auto& each : returned) stack->push_back(std::move(each));
}

// Those that only look at a tensor's shape or storage, and work on any device.
const std::set<std::string> kKept = {"empty.memory_format",
                                     "empty_strided",
                                     "set_",
                                     "set_.source_Storage",
                                     "set_.source_Storage_storage_offset",
                                     "set_.source_Tensor",
                                     "resize_",
                                     "as_strided",
                                     "_reshape_alias",
                                     "view",
                                     "unfold",
                                     "_efficientzerotensor",
                                     "record_stream",
                                     "is_set_to",
                                     "_pin_memory",
                                     "is_pinned",
                                     "_fused_sdp_choice",
                                     "_has_same_storage_numel",
                                     "_assert_async",
                                     "_assert_async.msg",
                                     "_local_scalar_dense"};
// For CUDA they choose between libraries.
constexpr const char* kChosen[] = {"convolution", "convolution_backward", "copy_"};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& each : schema.returns()) {
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  }
  return false;
}

// Warned once for all that operators are overridden: that is what this file is for.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

at::Scalar local_scalar(const at::Tensor& of) {
  const c10::DeviceGuard guard(of.device());
  cuda_rig::Stream* const queue =
      cuda_rig::stream_of(c10::cuda::getCurrentCUDAStream(of.device().index()).stream());
  C10_CUDA_CHECK(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(queue)));
  return at::_local_scalar_dense(on_cpu(of));
}

struct Loaded {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};

  Loaded() {
    Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
      const auto op = dispatcher.findOp(name);
      if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema()) continue;
      if (is_view(op->schema()) || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
        continue;
      }
      std::string full = name.name.substr(6);
      if (!name.overload_name.empty()) full += "." + name.overload_name;
      if (kKept.count(full)) continue;
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    }
    for (const char* name : kChosen) {
      library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
    }
    library.impl("_local_scalar_dense", local_scalar);
    at::globalContext().setUserEnabledCuDNN(false);
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
  }
};

auto* const loaded = new Loaded;

}  // namespace
