// The operations of c10d, each with what its record says of it (docs/understand/measuring.md).
#include <utility>

#include "delegating_backend.h"

// Issues an operation on the inner backend, where its tag is `tag_there`.
#define ON_INNER(operation) \
  [&](c10d::Backend& inner, [[maybe_unused]] int tag_there) { return inner.operation; }

namespace crux {

auto DelegatingBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) -> WorkPtr {
  const Call call{Op::kBroadcast, bytes_of(tensors), !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return run(device_holding(tensors), call, ON_INNER(broadcast(tensors, opts)));
}

auto DelegatingBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) -> WorkPtr {
  const Call call{Op::kAllreduce, bytes_of(tensors), !opts.asyncOp};
  return run(device_holding(tensors), call, ON_INNER(allreduce(tensors, opts)));
}

auto DelegatingBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts)
    -> WorkPtr {
  const Call call{Op::kAllreduceSparse, bytes_of(tensors), !opts.asyncOp};
  return run(device_holding(tensors), call, ON_INNER(allreduce_sparse(tensors, opts)));
}

auto DelegatingBackend::allreduce_coalesced(Tensors& tensors,
                                            const c10d::AllreduceCoalescedOptions& opts)
    -> WorkPtr {
  const Call call{Op::kAllreduceCoalesced, bytes_of(tensors), !opts.asyncOp};
  return run(device_holding(tensors), call, ON_INNER(allreduce_coalesced(tensors, opts)));
}

auto DelegatingBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) -> WorkPtr {
  const Call call{Op::kReduce, bytes_of(tensors), !opts.asyncOp, static_cast<int>(opts.rootRank)};
  return run(device_holding(tensors), call, ON_INNER(reduce(tensors, opts)));
}

auto DelegatingBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) -> WorkPtr {
  const Call call{Op::kAllgather, bytes_of(inputs) * size_, !opts.asyncOp};
  return run(device_holding(inputs), call, ON_INNER(allgather(outputs, inputs, opts)));
}

auto DelegatingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                        const c10d::AllgatherOptions& opts) -> WorkPtr {
  const Call call{Op::kAllgatherSingle, bytes_of(output), !opts.asyncOp};
  return run(input.device(), call, ON_INNER(_allgather_base(output, input, opts)));
}

auto DelegatingBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) -> WorkPtr {
  const Call call{Op::kAllgatherCoalesced, bytes_of(inputs) * size_, !opts.asyncOp};
  return run(device_holding(inputs), call, ON_INNER(allgather_coalesced(outputs, inputs, opts)));
}

auto DelegatingBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& opts)
    -> WorkPtr {
  const Call call{Op::kAllgatherCoalesced, bytes_of(outputs), !opts.asyncOp, -1,
                  /*has_future=*/false};
  return run(device_holding(inputs), call,
             ON_INNER(allgather_into_tensor_coalesced(outputs, inputs, opts)));
}

auto DelegatingBackend::gather(TensorLists& outputs, Tensors& inputs,
                               const c10d::GatherOptions& opts) -> WorkPtr {
  const Call call{Op::kGather, bytes_of(inputs) * size_, !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return run(device_holding(inputs), call, ON_INNER(gather(outputs, inputs, opts)));
}

#ifdef CRUX_C10D_HAS_GATHER_INTO_TENSOR
auto DelegatingBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                           const c10d::GatherOptions& opts) -> WorkPtr {
  const Call call{Op::kGather, bytes_of(input) * size_, !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return run(input.device(), call, ON_INNER(gather_into_tensor(output, input, opts)));
}
#endif

auto DelegatingBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                const c10d::ScatterOptions& opts) -> WorkPtr {
  const Call call{Op::kScatter, bytes_of(outputs) * size_, !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return run(device_holding(outputs), call, ON_INNER(scatter(outputs, inputs, opts)));
}

auto DelegatingBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                       const c10d::ReduceScatterOptions& opts) -> WorkPtr {
  const Call call{Op::kReduceScatter, bytes_of(outputs) * size_, !opts.asyncOp, -1,
                  /*has_future=*/false};
  return run(device_holding(outputs), call, ON_INNER(reduce_scatter(outputs, inputs, opts)));
}

auto DelegatingBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& opts) -> WorkPtr {
  const Call call{Op::kReduceScatterSingle, bytes_of(input), !opts.asyncOp, -1,
                  /*has_future=*/false};
  return run(input.device(), call, ON_INNER(_reduce_scatter_base(output, input, opts)));
}

auto DelegatingBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& opts)
    -> WorkPtr {
  const Call call{Op::kReduceScatterCoalesced, bytes_of(inputs), !opts.asyncOp, -1,
                  /*has_future=*/false};
  return run(device_holding(inputs), call,
             ON_INNER(reduce_scatter_tensor_coalesced(outputs, inputs, opts)));
}

auto DelegatingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                      std::vector<int64_t>& output_splits,
                                      std::vector<int64_t>& input_splits,
                                      const c10d::AllToAllOptions& opts) -> WorkPtr {
  const Call call{Op::kAlltoallSingle, bytes_of(input), !opts.asyncOp};
  return run(input.device(), call,
             ON_INNER(alltoall_base(output, input, output_splits, input_splits, opts)));
}

auto DelegatingBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                 const c10d::AllToAllOptions& opts) -> WorkPtr {
  const Call call{Op::kAlltoall, bytes_of(inputs), !opts.asyncOp};
  return run(device_holding(inputs), call, ON_INNER(alltoall(outputs, inputs, opts)));
}

auto DelegatingBackend::send(Tensors& tensors, int dst, int tag) -> WorkPtr {
  const Call call{Op::kSend, bytes_of(tensors), false, dst, /*has_future=*/false, tag};
  return run(device_holding(tensors), call, ON_INNER(send(tensors, dst, tag_there)));
}

auto DelegatingBackend::recv(Tensors& tensors, int src, int tag) -> WorkPtr {
  const Call call{Op::kRecv, bytes_of(tensors), false, src, /*has_future=*/false, tag};
  return run(device_holding(tensors), call, ON_INNER(recv(tensors, src, tag_there)));
}

auto DelegatingBackend::recvAnysource(Tensors& tensors, int tag) -> WorkPtr {
  const Call call{Op::kRecv, bytes_of(tensors), false, -1, /*has_future=*/false, tag};
  return run(device_holding(tensors), call, ON_INNER(recvAnysource(tensors, tag_there)));
}

auto DelegatingBackend::barrier(const c10d::BarrierOptions& opts) -> WorkPtr {
  const c10::Device device = opts.device ? *opts.device : c10::Device(default_device());
  return run(device, {Op::kBarrier, 0, !opts.asyncOp}, ON_INNER(barrier(opts)));
}

void DelegatingBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Handover::Ticket ticket = at(Device::CPU).collective(Device::CPU);
  // It throws after it has run, so it counts however it ends.
  ticket.issued();
  c10d::Backend& inner = *ticket.inner()->backend;
  if (!log_.recorder().enabled()) return inner.monitoredBarrier(opts, wait_all_ranks);
  Record record = log_.record_of({Op::kBarrier, 0, /*synchronous=*/true}, Device::CPU);
  try {
    inner.monitoredBarrier(opts, wait_all_ranks);
  } catch (...) {
    record.status = Status::kFailed;
    record.end_ns = monotonic_ns();
    log_.recorder().push(record);
    throw;
  }
  record.end_ns = monotonic_ns();
  log_.recorder().push(record);
}

}  // namespace crux
