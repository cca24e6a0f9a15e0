#include "delegating_backend.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "waited_work.h"

namespace crux {
namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  if (tensor.is_sparse()) return bytes_of(tensor._indices()) + bytes_of(tensor._values());
  return static_cast<int64_t>(tensor.nbytes());
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

c10::DeviceType device_type_of(const at::Tensor& tensor) { return tensor.device().type(); }

c10::DeviceType device_type_of(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? c10::DeviceType::CPU : device_type_of(tensors.front());
}

bool is_transfer(Op op) { return op == Op::kSend || op == Op::kRecv; }

}  // namespace

DelegatingBackend::DelegatingBackend(std::string name, int rank, int size, Recorder& recorder)
    : Backend(rank, size),
      name_(std::move(name)),
      recorder_(recorder),
      group_(recorder.add_group({"", {}, rank, size})) {}

DelegatingBackend::~DelegatingBackend() {
  block_.reset();
  for (const auto& inners : switches()) inners->close();
}

void DelegatingBackend::add_inner(Device device, BackendPtr backend) {
  TORCH_CHECK(backend != nullptr, "crux: add_inner needs a backend");
  for (const auto& inners : switches()) {
    if (inners->backend() == backend) {
      inners_[device] = inners;
      return;
    }
  }
  inners_[device] =
      std::make_shared<InnerSwitch>(std::move(backend), device, getID(), recorder_, group_);
}

InnerSwitch& DelegatingBackend::at(Device device) const {
  const auto found = inners_.find(device);
  TORCH_CHECK(found != inners_.end(), "No backend type associated with device type ",
              c10::DeviceTypeName(device, /*lower_case=*/true));
  return *found->second;
}

DelegatingBackend::BackendPtr DelegatingBackend::inner(Device device) const {
  return at(device).backend();
}

DelegatingBackend::Device DelegatingBackend::default_device() const {
  const auto cpu = inners_.find(Device::CPU);
  for (const auto& [device, inners] : inners_) {
    if (cpu == inners_.end() || inners != cpu->second) {
      if (device != Device::CPU) return device;
    }
  }
  return Device::CPU;
}

std::vector<std::shared_ptr<InnerSwitch>> DelegatingBackend::switches() const {
  std::vector<std::shared_ptr<InnerSwitch>> found;
  for (const auto& [device, inners] : inners_) {
    if (std::find(found.begin(), found.end(), inners) == found.end()) found.push_back(inners);
  }
  return found;
}

InnerSwitch::Ticket DelegatingBackend::count(InnerSwitch& inners, const Call& call) const {
  if (estimating_ || call.op == Op::kCoalesced) return inners.uncounted();
  if (!is_transfer(call.op)) return inners.collective();
  if (call.peer < 0) return inners.any_source(call.tag);
  return inners.transfer(call.peer, call.tag, call.op == Op::kSend);
}

InnerSwitch::Ticket& DelegatingBackend::enter(InnerSwitch& inners, const Call& call,
                                              std::optional<InnerSwitch::Ticket>& own) {
  if (!described_.load(std::memory_order_relaxed)) describe();
  if (!block_ || &inners != &default_switch()) return own.emplace(count(inners, call));
  // Which key a block's transfers will have isn't known when it is opened.
  if (is_transfer(call.op)) inners.keep_transfers();
  if (block_->ticket) {
    const bool counts = !is_transfer(call.op) && call.op != Op::kCoalesced && !estimating_;
    if (counts) inners.count_collective();
    return *block_->ticket;
  }
  block_->ticket.emplace(count(inners, call));
  block_->ticket->inner()->backend->startCoalescing();
  return *block_->ticket;
}

Record DelegatingBackend::begin(const Call& call, Device device) {
  Record record;
  record.issue_ns = record.start_ns = monotonic_ns();
  record.sequence =
      (is_transfer(call.op) ? transfers_ : collectives_).fetch_add(1, std::memory_order_relaxed);
  record.bytes = call.bytes;
  record.group = group_;
  record.world_size = static_cast<uint32_t>(size_);
  record.peer = call.peer;
  record.op = call.op;
  record.device = device == Device::CPU ? 0 : 1;
  return record;
}

template <typename Issue>
DelegatingBackend::WorkPtr DelegatingBackend::record(Device device, const Call& call,
                                                     Issue&& issue) {
  InnerSwitch& inners = at(device);
  std::optional<InnerSwitch::Ticket> own;
  InnerSwitch::Ticket& ticket = enter(inners, call, own);
  const Inner& inner = *ticket.inner();
  inners.before_issue(ticket);
  const auto run = [&]() -> WorkPtr {
    if constexpr (std::is_invocable_v<Issue, c10d::Backend&, int>) {
      return issue(*inner.backend, inner.tag_of(call.tag));
    } else {
      return issue(*inner.backend);
    }
  };
  WorkPtr work;
  if (!recorder_.enabled()) {
    work = run();
    inners.issued(ticket, work);
    return work;
  }
  Record record = begin(call, device);
  try {
    work = run();
    inners.issued(ticket, work);
  } catch (...) {
    record.status = Status::kFailed;
    record.end_ns = monotonic_ns();
    recorder_.push(record);
    throw;
  }
  try {
    return finish_later(inner, call, record, work);
  } catch (const std::exception&) {
    // The operation is under way: that its handle has no future is not the caller's trouble.
    record.status = Status::kIncomplete;
    recorder_.push(record);
    return work;
  }
}

DelegatingBackend::WorkPtr DelegatingBackend::finish_later(const Inner& inner, const Call& call,
                                                           const Record& record, WorkPtr work) {
  if (coalescing_) {
    coalesced_.push_back(record);
    coalesced_.back().flags |= kInCoalescedGroup;
    return work;
  }
  if (!work) {
    // A rank without a part in the operation has nothing to wait for.
    flush_coalesced(Status::kOk);
    recorder_.push(record);
    return work;
  }
  if (inner.completion == Completion::kFuture && !call.has_future) {
    return c10::make_intrusive<WaitedWork>(std::move(work), recorder_, record);
  }
  if (inner.completion == Completion::kFuture) {
    std::vector<Record> parts;
    parts.swap(coalesced_);
    // Runs on the thread that completes the operation, without the GIL.
    work->getFuture()->addCallback([&recorder = recorder_, whole = record,
                                    parts = std::move(parts)](c10::ivalue::Future& future) mutable {
      whole.end_ns = monotonic_ns();
      whole.status = future.hasError() ? Status::kFailed : Status::kOk;
      for (Record& part : parts) {
        part.end_ns = whole.end_ns;
        part.status = whole.status;
        recorder.push(part);
      }
      recorder.push(whole);
    });
    return work;
  }
  flush_coalesced(Status::kOk);
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  if (inner.completion == Completion::kHook) {
    Record timed = record;
    timed.start_ns = kUnknownTime;
    inner.table->issued(work->getCompletionKey(), timed);
    return work;
  }
#endif
  Record untimed = record;
  untimed.start_ns = kUnknownTime;
  recorder_.push(untimed);
  return work;
}

DelegatingBackend::WorkPtr DelegatingBackend::broadcast(Tensors& tensors,
                                                        const c10d::BroadcastOptions& opts) {
  const Call call{Op::kBroadcast, bytes_of(tensors), static_cast<int>(opts.rootRank)};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allreduce(Tensors& tensors,
                                                        const c10d::AllreduceOptions& opts) {
  const Call call{Op::kAllreduce, bytes_of(tensors)};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allreduce_sparse(Tensors& tensors,
                                                               const c10d::AllreduceOptions& opts) {
  const Call call{Op::kAllreduceSparse, bytes_of(tensors)};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  const Call call{Op::kAllreduceCoalesced, bytes_of(tensors)};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner) { return inner.allreduce_coalesced(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::reduce(Tensors& tensors,
                                                     const c10d::ReduceOptions& opts) {
  const Call call{Op::kReduce, bytes_of(tensors), static_cast<int>(opts.rootRank)};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner) { return inner.reduce(tensors, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgather, bytes_of(inputs) * size_};
  return record(device_type_of(inputs), call,
                [&](c10d::Backend& inner) { return inner.allgather(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                              const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgatherSingle, bytes_of(output)};
  return record(device_type_of(input), call,
                [&](c10d::Backend& inner) { return inner._allgather_base(output, input, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgatherCoalesced, bytes_of(inputs) * size_};
  return record(device_type_of(inputs), call, [&](c10d::Backend& inner) {
    return inner.allgather_coalesced(outputs, inputs, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Call call{Op::kAllgatherCoalesced, bytes_of(outputs), -1, /*has_future=*/false};
  return record(device_type_of(inputs), call, [&](c10d::Backend& inner) {
    return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::gather(TensorLists& outputs, Tensors& inputs,
                                                     const c10d::GatherOptions& opts) {
  const Call call{Op::kGather, bytes_of(inputs) * size_, static_cast<int>(opts.rootRank)};
  return record(device_type_of(inputs), call,
                [&](c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
}

#ifdef CRUX_C10D_HAS_GATHER_INTO_TENSOR
DelegatingBackend::WorkPtr DelegatingBackend::gather_into_tensor(at::Tensor& output,
                                                                 at::Tensor& input,
                                                                 const c10d::GatherOptions& opts) {
  const Call call{Op::kGather, bytes_of(input) * size_, static_cast<int>(opts.rootRank)};
  return record(device_type_of(input), call, [&](c10d::Backend& inner) {
    return inner.gather_into_tensor(output, input, opts);
  });
}
#endif

DelegatingBackend::WorkPtr DelegatingBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                      const c10d::ScatterOptions& opts) {
  const Call call{Op::kScatter, bytes_of(outputs) * size_, static_cast<int>(opts.rootRank)};
  return record(device_type_of(outputs), call,
                [&](c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  const Call call{Op::kReduceScatter, bytes_of(outputs) * size_, -1, /*has_future=*/false};
  return record(device_type_of(outputs), call,
                [&](c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  const Call call{Op::kReduceScatterSingle, bytes_of(input), -1, /*has_future=*/false};
  return record(device_type_of(input), call, [&](c10d::Backend& inner) {
    return inner._reduce_scatter_base(output, input, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const Call call{Op::kReduceScatterCoalesced, bytes_of(inputs), -1, /*has_future=*/false};
  return record(device_type_of(inputs), call, [&](c10d::Backend& inner) {
    return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                            std::vector<int64_t>& output_splits,
                                                            std::vector<int64_t>& input_splits,
                                                            const c10d::AllToAllOptions& opts) {
  const Call call{Op::kAlltoallSingle, bytes_of(input)};
  return record(device_type_of(input), call, [&](c10d::Backend& inner) {
    return inner.alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

DelegatingBackend::WorkPtr DelegatingBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllToAllOptions& opts) {
  const Call call{Op::kAlltoall, bytes_of(inputs)};
  return record(device_type_of(inputs), call,
                [&](c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
}

DelegatingBackend::WorkPtr DelegatingBackend::send(Tensors& tensors, int dst, int tag) {
  const Call call{Op::kSend, bytes_of(tensors), dst, /*has_future=*/false, tag};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner, int on) { return inner.send(tensors, dst, on); });
}

DelegatingBackend::WorkPtr DelegatingBackend::recv(Tensors& tensors, int src, int tag) {
  const Call call{Op::kRecv, bytes_of(tensors), src, /*has_future=*/false, tag};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner, int on) { return inner.recv(tensors, src, on); });
}

DelegatingBackend::WorkPtr DelegatingBackend::recvAnysource(Tensors& tensors, int tag) {
  const Call call{Op::kRecv, bytes_of(tensors), -1, /*has_future=*/false, tag};
  return record(device_type_of(tensors), call,
                [&](c10d::Backend& inner, int on) { return inner.recvAnysource(tensors, on); });
}

DelegatingBackend::WorkPtr DelegatingBackend::barrier(const c10d::BarrierOptions& opts) {
  const Device device = opts.device ? opts.device->type() : default_device();
  return record(device, {Op::kBarrier, 0},
                [&](c10d::Backend& inner) { return inner.barrier(opts); });
}

void DelegatingBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  InnerSwitch::Ticket ticket = at(Device::CPU).collective();
  // It throws after it has run, so it counts however it ends.
  ticket.issued();
  c10d::Backend& inner = *ticket.inner()->backend;
  if (!recorder_.enabled()) return inner.monitoredBarrier(opts, wait_all_ranks);
  Record record = begin({Op::kBarrier, 0}, Device::CPU);
  try {
    inner.monitoredBarrier(opts, wait_all_ranks);
  } catch (...) {
    record.status = Status::kFailed;
    record.end_ns = monotonic_ns();
    recorder_.push(record);
    throw;
  }
  record.end_ns = monotonic_ns();
  recorder_.push(record);
}

void DelegatingBackend::startCoalescing() {
  const BackendPtr inner = default_inner();
  block_.reset();
  if (inner->supportsCoalescing()) {
    block_.emplace();
  } else {
    inner->startCoalescing();
  }
  coalescing_ = recorder_.enabled();
}

DelegatingBackend::WorkPtr DelegatingBackend::endCoalescing() {
  coalescing_ = false;
  try {
    WorkPtr work = record(default_device(), {Op::kCoalesced, 0},
                          [](c10d::Backend& inner) { return inner.endCoalescing(); });
    block_.reset();
    return work;
  } catch (...) {
    block_.reset();
    flush_coalesced(Status::kFailed);
    throw;
  }
}

void DelegatingBackend::flush_coalesced(Status status) {
  for (Record& part : coalesced_) {
    part.status = status;
    recorder_.push(part);
  }
  coalesced_.clear();
}

}  // namespace crux
