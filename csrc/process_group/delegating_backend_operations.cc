// The operations of c10d, each with what its record says of it: see docs/recorder.md for the bytes.
#include <utility>

#include "delegating_backend.h"

namespace crux {
namespace {

c10::Device device_holding(const at::Tensor& tensor) { return tensor.device(); }

}  // namespace

DelegatingBackend::WorkPtr DelegatingBackend::broadcast(Tensors& tensors,
                                                        const c10d::BroadcastOptions& opts) {
  const Call call{Op::kBroadcast, bytes_of(tensors), !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allreduce(Tensors& tensors,
                                                        const c10d::AllreduceOptions& opts) {
  const Call call{Op::kAllreduce, bytes_of(tensors), !opts.asyncOp};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allreduce_sparse(Tensors& tensors,
                                                               const c10d::AllreduceOptions& opts) {
  const Call call{Op::kAllreduceSparse, bytes_of(tensors), !opts.asyncOp};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  const Call call{Op::kAllreduceCoalesced, bytes_of(tensors), !opts.asyncOp};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner) { return inner.allreduce_coalesced(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::reduce(Tensors& tensors,
                                                     const c10d::ReduceOptions& opts) {
  const Call call{Op::kReduce, bytes_of(tensors), !opts.asyncOp, static_cast<int>(opts.rootRank)};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner) { return inner.reduce(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgather, bytes_of(inputs) * size_, !opts.asyncOp};
  return record(device_holding(inputs), call,
                [&](c10d::Backend& inner) { return inner.allgather(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                              const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgatherSingle, bytes_of(output), !opts.asyncOp};
  return record(device_holding(input), call,
                [&](c10d::Backend& inner) { return inner._allgather_base(output, input, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgatherCoalesced, bytes_of(inputs) * size_, !opts.asyncOp};
  return record(device_holding(inputs), call, [&](c10d::Backend& inner) {
    return inner.allgather_coalesced(outputs, inputs, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgatherCoalesced, bytes_of(outputs), !opts.asyncOp, -1,
                  /*has_future=*/false};
  return record(device_holding(inputs), call, [&](c10d::Backend& inner) {
    return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::gather(TensorLists& outputs, Tensors& inputs,
                                                     const c10d::GatherOptions& opts) {
  const Call call{Op::kGather, bytes_of(inputs) * size_, !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return record(device_holding(inputs), call,
                [&](c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
}

#ifdef CRUX_C10D_HAS_GATHER_INTO_TENSOR
DelegatingBackend::WorkPtr DelegatingBackend::gather_into_tensor(at::Tensor& output,
                                                                 at::Tensor& input,
                                                                 const c10d::GatherOptions& opts) {
  const Call call{Op::kGather, bytes_of(input) * size_, !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return record(device_holding(input), call, [&](c10d::Backend& inner) {
    return inner.gather_into_tensor(output, input, opts);
  });
}
#endif

DelegatingBackend::WorkPtr DelegatingBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                      const c10d::ScatterOptions& opts) {
  const Call call{Op::kScatter, bytes_of(outputs) * size_, !opts.asyncOp,
                  static_cast<int>(opts.rootRank)};
  return record(device_holding(outputs), call,
                [&](c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  const Call call{Op::kReduceScatter, bytes_of(outputs) * size_, !opts.asyncOp, -1,
                  /*has_future=*/false};
  return record(device_holding(outputs), call,
                [&](c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  const Call call{Op::kReduceScatterSingle, bytes_of(input), !opts.asyncOp, -1,
                  /*has_future=*/false};
  return record(device_holding(input), call, [&](c10d::Backend& inner) {
    return inner._reduce_scatter_base(output, input, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const Call call{Op::kReduceScatterCoalesced, bytes_of(inputs), !opts.asyncOp, -1,
                  /*has_future=*/false};
  return record(device_holding(inputs), call, [&](c10d::Backend& inner) {
    return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                            std::vector<int64_t>& output_splits,
                                                            std::vector<int64_t>& input_splits,
                                                            const c10d::AllToAllOptions& opts) {
  const Call call{Op::kAlltoallSingle, bytes_of(input), !opts.asyncOp};
  return record(device_holding(input), call, [&](c10d::Backend& inner) {
    return inner.alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllToAllOptions& opts) {
  const Call call{Op::kAlltoall, bytes_of(inputs), !opts.asyncOp};
  return record(device_holding(inputs), call,
                [&](c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::send(Tensors& tensors, int dst, int tag) {
  const Call call{Op::kSend, bytes_of(tensors), false, dst, /*has_future=*/false, tag};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner, int on) { return inner.send(tensors, dst, on); });
}

DelegatingBackend::WorkPtr DelegatingBackend::recv(Tensors& tensors, int src, int tag) {
  const Call call{Op::kRecv, bytes_of(tensors), false, src, /*has_future=*/false, tag};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner, int on) { return inner.recv(tensors, src, on); });
}

DelegatingBackend::WorkPtr DelegatingBackend::recvAnysource(Tensors& tensors, int tag) {
  const Call call{Op::kRecv, bytes_of(tensors), false, -1, /*has_future=*/false, tag};
  return record(device_holding(tensors), call,
                [&](c10d::Backend& inner, int on) { return inner.recvAnysource(tensors, on); });
}

DelegatingBackend::WorkPtr DelegatingBackend::barrier(const c10d::BarrierOptions& opts) {
  const c10::Device device = opts.device ? *opts.device : c10::Device(default_device());
  return record(device, {Op::kBarrier, 0, !opts.asyncOp},
                [&](c10d::Backend& inner) { return inner.barrier(opts); });
}

void DelegatingBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  InnerSwitch::Ticket ticket = at(Device::CPU).collective(Device::CPU);
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
