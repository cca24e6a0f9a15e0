// What each operation of the fake NCCL does, as steps on its Gloo.
#include <ATen/ATen.h>

#include <utility>

#include "nccl.h"
#include "tensors.h"

namespace fake_gpu {
namespace {

using Started = Step::Started;

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// A step on the tensors as they are when it runs.
template <typename Start>
Step step_on(const char* name, const std::vector<at::Tensor>& tensors, Start start) {
  auto operands = std::make_shared<std::vector<Operand>>();
  const Stream& current = Streams::instance().current(Streams::current_device());
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    operands->emplace_back(tensor);
    if (current.capturing()) operands->back().pin();
  }
  return {[operands, name, start](c10d::Backend& gloo) -> Started {
    std::vector<at::Tensor> on_cpu;
    for (const Operand& operand : *operands) on_cpu.push_back(operand.on_cpu(name));
    auto begin = start;
    return begin(gloo, on_cpu);
  }};
}

// Gloo has no average, and takes booleans for bytes.
Started reduce_all(c10d::Backend& gloo, at::Tensor tensor, const c10d::ReduceOp& op,
                   std::function<void()> then) {
  TORCH_CHECK(op != c10d::ReduceOp::PREMUL_SUM, "fakenccl: PREMUL_SUM is not there");
  const bool average = op == c10d::ReduceOp::AVG;
  c10d::AllreduceOptions opts;
  opts.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  if (tensor.scalar_type() == at::kBool) {
    tensor = tensor.view(at::kByte);
    if (opts.reduceOp == c10d::ReduceOp::SUM) opts.reduceOp = c10d::ReduceOp::MAX;
  }
  std::vector<at::Tensor> tensors{tensor};
  const int size = gloo.getSize();
  return {{gloo.allreduce(tensors, opts)}, [tensor, average, size, then]() mutable {
            if (average) tensor.div_(size);
            if (then) then();
          }};
}

Step sum_up(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return step_on("allreduce", {tensor}, [op](c10d::Backend& gloo, std::vector<at::Tensor>& on) {
    return reduce_all(gloo, on[0], op, nullptr);
  });
}

Step gather_flat(const at::Tensor& output, const at::Tensor& input, int size) {
  return step_on("all_gather", {output, input},
                 [size](c10d::Backend& gloo, std::vector<at::Tensor>& on) -> Started {
                   std::vector<std::vector<at::Tensor>> outs{chunks(on[0], size)};
                   std::vector<at::Tensor> in{on[1].view(-1)};
                   return {{gloo.allgather(outs, in, c10d::AllgatherOptions())}, nullptr};
                 });
}

// Sums everything everywhere and keeps a part: slow, and right.
Step scatter_flat(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                  int rank, int size) {
  return step_on("reduce_scatter", {output, input},
                 [op, rank, size](c10d::Backend& gloo, std::vector<at::Tensor>& on) {
                   const at::Tensor whole = on[1].clone();
                   const at::Tensor out = on[0];
                   return reduce_all(gloo, whole, op, [whole, out, rank, size] {
                     out.view(-1).copy_(chunks(whole, size)[static_cast<size_t>(rank)]);
                   });
                 });
}

}  // namespace

Nccl::WorkPtr Nccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const int64_t root = opts.rootRank;
  auto step = step_on("broadcast", tensors, [root](c10d::Backend& gloo, Tensors& on) -> Started {
    c10d::BroadcastOptions on_gloo;
    on_gloo.rootRank = root;
    return {{gloo.broadcast(on, on_gloo)}, nullptr};
  });
  Call call(c10d::OpType::BROADCAST, std::move(step), {}, tensors, bytes_of(tensors));
  return issue(std::move(call).with(opts, root));
}

Nccl::WorkPtr Nccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  TORCH_CHECK(tensors.size() == 1, "Only single tensor supported");
  Call call(c10d::OpType::ALLREDUCE, sum_up(tensors[0], opts.reduceOp), {}, tensors,
            bytes_of(tensors));
  return issue(std::move(call).with(opts));
}

Nccl::WorkPtr Nccl::allreduce_coalesced(Tensors& tensors,
                                        const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) {
    Call call(c10d::OpType::ALLREDUCE_COALESCED, sum_up(tensor, opts.reduceOp), {}, {tensor},
              bytes_of({tensor}));
    calls.push_back(std::move(call).with(opts));
  }
  return issue_all(std::move(calls));
}

Nccl::WorkPtr Nccl::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const c10d::ReduceOp op = opts.reduceOp;
  const bool root = opts.rootRank == rank_;
  auto step = step_on("reduce", tensors, [op, root](c10d::Backend& gloo, Tensors& on) {
    // Other ranks' tensors stay what they are.
    return reduce_all(gloo, root ? on[0] : on[0].clone(), op, nullptr);
  });
  Call call(c10d::OpType::REDUCE, std::move(step), {}, tensors, bytes_of(tensors));
  return issue(std::move(call).with(opts, opts.rootRank));
}

Nccl::WorkPtr Nccl::allgather(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1,
              "Only single tensor / single list supported");
  Tensors all = outputs[0];
  append(all, inputs);
  auto step = step_on("allgather", all, [](c10d::Backend& gloo, Tensors& on) -> Started {
    TensorLists outs{Tensors(on.begin(), on.end() - 1)};
    Tensors in{on.back()};
    return {{gloo.allgather(outs, in, c10d::AllgatherOptions())}, nullptr};
  });
  Call call(c10d::OpType::ALLGATHER, std::move(step), inputs, outputs[0], bytes_of(outputs[0]));
  return issue(std::move(call).with(opts));
}

Nccl::WorkPtr Nccl::_allgather_base(at::Tensor& output, at::Tensor& input,
                                    const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(output.numel() == input.numel() * size_,
              "output tensor size must be equal to world_size times input tensor size");
  Call call(c10d::OpType::_ALLGATHER_BASE, gather_flat(output, input, size_), {input}, {output},
            bytes_of({output}));
  return issue(std::move(call).with(opts));
}

Nccl::WorkPtr Nccl::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& output = outputs.at(i);
    Call call(c10d::OpType::_ALLGATHER_BASE, gather_flat(output, inputs[i], size_), {inputs[i]},
              {output}, bytes_of({output}));
    calls.push_back(std::move(call).with(opts));
  }
  return issue_all(std::move(calls));
}

Nccl::WorkPtr Nccl::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  TORCH_CHECK(inputs.size() == 1, "Only single input tensor supported");
  const bool root = opts.rootRank == rank_;
  const Tensors results = root ? outputs.at(0) : Tensors{};
  Tensors all = results;
  all.push_back(inputs[0]);
  auto step = step_on("gather", all, [root, opts](c10d::Backend& gloo, Tensors& on) -> Started {
    TensorLists outs;
    if (root) outs.emplace_back(on.begin(), on.end() - 1);
    Tensors in{on.back()};
    c10d::GatherOptions on_gloo;
    on_gloo.rootRank = opts.rootRank;
    return {{gloo.gather(outs, in, on_gloo)}, nullptr};
  });
  Call call(c10d::OpType::GATHER, std::move(step), inputs, results, bytes_of(inputs) * size_);
  return issue(std::move(call).with(opts, opts.rootRank));
}

Nccl::WorkPtr Nccl::scatter(Tensors& outputs, TensorLists& inputs,
                            const c10d::ScatterOptions& opts) {
  TORCH_CHECK(outputs.size() == 1, "Only single output tensor supported");
  const bool root = opts.rootRank == rank_;
  const Tensors given = root ? inputs.at(0) : Tensors{};
  Tensors all = given;
  all.push_back(outputs[0]);
  auto step = step_on("scatter", all, [root, opts](c10d::Backend& gloo, Tensors& on) -> Started {
    TensorLists in;
    if (root) in.emplace_back(on.begin(), on.end() - 1);
    Tensors out{on.back()};
    c10d::ScatterOptions on_gloo;
    on_gloo.rootRank = opts.rootRank;
    return {{gloo.scatter(out, in, on_gloo)}, nullptr};
  });
  Call call(c10d::OpType::SCATTER, std::move(step), given, outputs, bytes_of(outputs) * size_);
  return issue(std::move(call).with(opts, opts.rootRank));
}

Nccl::WorkPtr Nccl::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1,
              "Only single tensor / single list supported");
  Tensors all = inputs[0];
  all.push_back(outputs[0]);
  const c10d::ReduceOp op = opts.reduceOp;
  const auto rank = static_cast<size_t>(rank_);
  auto step = step_on("reduce_scatter", all, [op, rank](c10d::Backend& gloo, Tensors& on) {
    Tensors flat;
    for (size_t i = 0; i + 1 < on.size(); ++i) flat.push_back(on[i].reshape(-1));
    const at::Tensor whole = at::cat(flat);
    const at::Tensor out = on.back();
    const int size = static_cast<int>(flat.size());
    return reduce_all(gloo, whole, op, [=] { out.view(-1).copy_(chunks(whole, size)[rank]); });
  });
  Call call(c10d::OpType::REDUCE_SCATTER, std::move(step), inputs[0], outputs, bytes_of(inputs[0]));
  return issue(std::move(call).with(opts));
}

Nccl::WorkPtr Nccl::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(input.numel() == output.numel() * size_,
              "input tensor size must be equal to world_size times output tensor size");
  Call call(c10d::OpType::_REDUCE_SCATTER_BASE,
            scatter_flat(output, input, opts.reduceOp, rank_, size_), {input}, {output},
            bytes_of({input}));
  return issue(std::move(call).with(opts));
}

Nccl::WorkPtr Nccl::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& output = outputs.at(i);
    Call call(c10d::OpType::_REDUCE_SCATTER_BASE,
              scatter_flat(output, inputs[i], opts.reduceOp, rank_, size_), {inputs[i]}, {output},
              bytes_of({inputs[i]}));
    calls.push_back(std::move(call).with(opts));
  }
  return issue_all(std::move(calls));
}

Nccl::WorkPtr Nccl::alltoall_base(at::Tensor& output, at::Tensor& input,
                                  std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits,
                                  const c10d::AllToAllOptions& opts) {
  auto step =
      step_on("alltoall", {output, input},
              [output_splits, input_splits](c10d::Backend& gloo, Tensors& on) mutable -> Started {
                return {{gloo.alltoall_base(on[0], on[1], output_splits, input_splits,
                                            c10d::AllToAllOptions())},
                        nullptr};
              });
  Call call(c10d::OpType::ALLTOALL_BASE, std::move(step), {input}, {output}, bytes_of({input}));
  return issue(std::move(call).with(opts));
}

Nccl::WorkPtr Nccl::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  TORCH_CHECK(static_cast<int>(inputs.size()) == size_ && inputs.size() == outputs.size(),
              "alltoall needs a tensor for each rank");
  Tensors all = outputs;
  append(all, inputs);
  auto step = step_on("alltoall", all, [](c10d::Backend& gloo, Tensors& on) -> Started {
    const size_t size = on.size() / 2;
    Tensors flat_in;
    std::vector<int64_t> in_splits;
    std::vector<int64_t> out_splits;
    int64_t out_numel = 0;
    for (size_t i = 0; i < size; ++i) {
      out_splits.push_back(on[i].numel());
      out_numel += on[i].numel();
      flat_in.push_back(on[size + i].reshape(-1));
      in_splits.push_back(on[size + i].numel());
    }
    at::Tensor in = at::cat(flat_in);
    at::Tensor out = at::empty({out_numel}, in.options());
    auto work = gloo.alltoall_base(out, in, out_splits, in_splits, c10d::AllToAllOptions());
    return {{work}, [out, on, size]() mutable {
              int64_t at = 0;
              for (size_t i = 0; i < size; ++i) {
                on[i].view(-1).copy_(out.narrow(0, at, on[i].numel()));
                at += on[i].numel();
              }
            }};
  });
  Call call(c10d::OpType::ALLTOALL, std::move(step), inputs, outputs, bytes_of(inputs));
  return issue(std::move(call).with(opts));
}

// NCCL has no tags: what one rank sends another arrives in order.
Nccl::WorkPtr Nccl::send(Tensors& tensors, int dst, int tag) {
  TORCH_CHECK(tensors.size() == 1, "Only single tensor supported");
  auto step = step_on("send", tensors, [dst](c10d::Backend& gloo, Tensors& on) -> Started {
    return {{gloo.send(on, dst, 0)}, nullptr};
  });
  Call call(c10d::OpType::SEND, std::move(step), tensors, tensors, bytes_of(tensors));
  call.peer = dst;
  call.tag = tag;
  return issue(std::move(call));
}

Nccl::WorkPtr Nccl::recv(Tensors& tensors, int src, int tag) {
  TORCH_CHECK(tensors.size() == 1, "Only single tensor supported");
  auto step = step_on("recv", tensors, [src](c10d::Backend& gloo, Tensors& on) -> Started {
    return {{gloo.recv(on, src, 0)}, nullptr};
  });
  Call call(c10d::OpType::RECV, std::move(step), {}, tensors, bytes_of(tensors));
  call.peer = src;
  call.tag = tag;
  return issue(std::move(call));
}

Nccl::WorkPtr Nccl::barrier(const c10d::BarrierOptions& opts) {
  Step step{[](c10d::Backend& gloo) -> Started {
    return {{gloo.barrier(c10d::BarrierOptions())}, nullptr};
  }};
  Call call = Call(c10d::OpType::BARRIER, std::move(step), {}, {}, 0).with(opts);
  call.device = device_;
  if (call.device < 0 && !opts.device_ids.empty()) {
    call.device = static_cast<int>(opts.device_ids[0]);
  }
  if (call.device < 0 && getBoundDeviceId()) call.device = getBoundDeviceId()->index();
  // The legacy class's handle of a barrier waits on the host too.
  call.host_blocking = settings_.legacy || !opts.asyncOp;
  return issue(std::move(call));
}

}  // namespace fake_gpu
