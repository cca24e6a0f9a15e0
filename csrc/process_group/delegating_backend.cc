#include "delegating_backend.h"

#include <algorithm>
#include <utility>

#include "gil_release.h"
#include "waited_work.h"

namespace crux {
namespace {

bool is_transfer(Op op) { return op == Op::kSend || op == Op::kRecv; }

}  // namespace

DelegatingBackend::DelegatingBackend(std::string name, int rank, int size, Recorder& recorder)
    : LikeGloo(rank, size),
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

bool DelegatingBackend::stand_as_gloo(OptionsPtr options) {
  if (!has_layout_of(*default_inner())) return false;
  set_options(std::move(options));
  return true;
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

InnerSwitch::Ticket& DelegatingBackend::enter(InnerSwitch& inners, c10::Device device,
                                              const Call& call,
                                              std::optional<InnerSwitch::Ticket>& own) {
  if (!described_.load(std::memory_order_relaxed)) describe();
  if (!block_ || &inners != &default_switch()) return own.emplace(count(inners, call));
  // When a block is opened, the keys of its transfers are not known.
  if (is_transfer(call.op)) inners.keep_transfers();
  if (block_->ticket) {
    const bool counts = !is_transfer(call.op) && call.op != Op::kCoalesced && !estimating_;
    if (counts) inners.count_collective();
    return *block_->ticket;
  }
  block_->device = device;
  block_->ticket.emplace(count(inners, call));
  block_->ticket->inner()->backend->startCoalescing();
  return *block_->ticket;
}

GateTicket DelegatingBackend::pass_gate(const InnerSwitch& inners, const Call& call) {
  const bool in_block = block_ && &inners == &default_switch();
  if (call.op == Op::kCoalesced) return in_block ? std::move(block_->gated) : GateTicket();
  Gate* const open = gate();
  // A receive is posted long before its data comes, and a barrier moves nothing.
  if (!open || call.op == Op::kRecv || call.op == Op::kBarrier || estimating_) return {};
  if (in_block && std::exchange(block_->passed_gate, true)) return {};
  GateTicket gated;
  {
    const GilRelease release;
    gated = GateTicket(open, group_, call.bytes);
  }
  if (!in_block) return gated;
  block_->gated = std::move(gated);
  return {};
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
  record.flags = call.synchronous ? kSynchronous : 0;
  return record;
}

DelegatingBackend::WorkPtr DelegatingBackend::run(c10::Device device, const Call& call,
                                                  IssueRef issue) {
  InnerSwitch& inners = at(device.type());
  std::optional<InnerSwitch::Ticket> own;
  InnerSwitch::Ticket& ticket = enter(inners, device, call, own);
  Inner& inner = *ticket.inner();
  const bool records = recorder_.enabled() && !estimating_;
  DeviceWatch* const watch = inner.watch(device);
  if (watch) watch->drop_handles();
  if (watch && watch->is_capturing()) {
    if (records && call.op != Op::kCoalesced) recorder_.pass_captured();
    WorkPtr work = issue(*inner.backend, inner.tag_of(call.tag));
    inners.captured(ticket);
    return work;
  }
  inners.before_issue(ticket);
  GateTicket gated = pass_gate(inners, call);
  std::optional<DeviceOperation> operation;
  Record record;
  if (records) {
    record = begin(call, device.type());
    if (is_part(call)) record.flags |= kInCoalescedGroup;
    if (is_timed()) {
      operation.emplace();
      operation->whole = record;
      operation->watch = watch;
      if (watch) inner.enable_timing();
      // The parts of a block run when it ends.
      if (watch && !is_part(call)) operation->mark = watch->mark(record.issue_ns);
    } else {
      record.flags |= kUntimed;
    }
  }
  WorkPtr work;
  try {
    work = issue(*inner.backend, inner.tag_of(call.tag));
    inners.issued(ticket, work);
  } catch (...) {
    record.status = Status::kFailed;
    record.end_ns = monotonic_ns();
    if (records) recorder_.push(record);
    throw;
  }
  if (records && !operation) recorder_.push(record);
  if (!operation && !gated) return work;
  const bool timed = operation.has_value();
  try {
    return finish_later(inner, call, std::move(operation), watch, work, std::move(gated));
  } catch (const std::exception&) {
    // The operation is under way, so the caller need not learn that its handle has no future.
    record.status = Status::kIncomplete;
    if (timed) recorder_.push(record);
    return work;
  }
}

DelegatingBackend::WorkPtr DelegatingBackend::finish_later(Inner& inner, const Call& call,
                                                           std::optional<DeviceOperation> operation,
                                                           DeviceWatch* watch, const WorkPtr& work,
                                                           GateTicket&& gated) {
  if (operation && is_part(call)) {
    coalesced_.push_back(operation->whole);
    return work;
  }
  if (operation) operation->parts.swap(coalesced_);
  if (inner.completion == Completion::kFuture && work) {
    return finish_by_future(call, std::move(operation), work, std::move(gated));
  }
  const bool is_told_by_hook = inner.completion == Completion::kHook && work;
  if (watch && (gated || !is_told_by_hook)) {
    hand_over(inner, call, operation, *watch, work, std::move(gated));
  }
  if (!operation) return work;
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  if (is_told_by_hook) {
    inner.table->issued(work->getCompletionKey(), std::move(*operation));
    return work;
  }
#endif
  // This rank takes no part in the operation, or nobody reports its end.
  inner.lanes->finish(*operation, kUnknownTime);
  return work;
}

void DelegatingBackend::hand_over(Inner& inner, const Call& call,
                                  std::optional<DeviceOperation>& operation, DeviceWatch& watch,
                                  const WorkPtr& work, GateTicket&& gated) {
  DeviceWatch::Watched watched;
  watched.owner = &inner;
  watched.work = work;
  watched.op = call.op;
  watched.bytes = call.bytes;
  watched.gated = std::move(gated);
  watched.lane = is_transfer(call.op) ? call.peer : Lanes::kCollectives;
  watched.lanes = inner.lanes;
  if (!work) {
    // Without a handle it runs on the stream that it was issued on.
    watched.end = watch.mark(monotonic_ns());
    if (operation) operation->whole.flags |= kSynchronous;
  }
  const bool has_duration =
      work ? inner.completion == Completion::kPolled && inner.enable_timing() : bool(watched.end);
  if (operation && has_duration) {
    watched.operation = std::make_unique<DeviceOperation>(std::move(*operation));
    operation.reset();
  }
  if ((work || watched.end) && (watched.operation || watched.gated)) {
    watch.watch(std::move(watched));
  }
}

DelegatingBackend::WorkPtr DelegatingBackend::finish_by_future(
    const Call& call, std::optional<DeviceOperation> operation, const WorkPtr& work,
    GateTicket&& gated) {
  Recorder* const recorder = operation ? &recorder_ : nullptr;
  Record whole = operation ? operation->whole : Record();
  if (!call.has_future) {
    return c10::make_intrusive<WaitedWork>(work, recorder, whole, std::move(gated));
  }
  std::shared_ptr<GateTicket> held;
  if (gated) held = std::make_shared<GateTicket>(std::move(gated));
  std::vector<Record> parts;
  if (operation) parts = std::move(operation->parts);
  // Runs on the thread that completes the operation, without the GIL.
  work->getFuture()->addCallback(
      [recorder, whole, parts = std::move(parts), held](c10::ivalue::Future& future) mutable {
        if (held) held->leave();
        if (!recorder) return;
        whole.end_ns = monotonic_ns();
        whole.status = future.hasError() ? Status::kFailed : Status::kOk;
        for (Record& part : parts) {
          part.end_ns = whole.end_ns;
          part.status = whole.status;
          recorder->push(part);
        }
        recorder->push(whole);
      });
  return work;
}

void DelegatingBackend::startCoalescing() {
  const BackendPtr inner = default_inner();
  block_.reset();
  if (inner->supportsCoalescing()) {
    block_.emplace();
  } else {
    inner->startCoalescing();
  }
  coalescing_ = !recorder_.enabled() ? Coalescing::kNo
                : recorder_.timing() ? Coalescing::kTimed
                                     : Coalescing::kUntimed;
}

DelegatingBackend::WorkPtr DelegatingBackend::endCoalescing() {
  try {
    const bool begun = block_ && block_->ticket;
    const c10::Device device = begun ? block_->device : c10::Device(default_device());
    WorkPtr work = record(device, {Op::kCoalesced, 0},
                          [](c10d::Backend& inner) { return inner.endCoalescing(); });
    coalescing_ = Coalescing::kNo;
    block_.reset();
    return work;
  } catch (...) {
    coalescing_ = Coalescing::kNo;
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
