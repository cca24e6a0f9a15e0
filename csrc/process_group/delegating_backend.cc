#include "delegating_backend.h"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "python_threads.h"

namespace crux {
DelegatingBackend::DelegatingBackend(std::string name, int rank, int size, Recorder& recorder)
    : LikeGloo(rank, size), name_(std::move(name)), log_(rank, size, recorder) {}

DelegatingBackend::~DelegatingBackend() {
  block_.reset();
  for (const auto& inners : handovers()) inners->close();
}

void DelegatingBackend::add_inner(Device device, BackendPtr backend) {
  TORCH_CHECK(backend != nullptr, "crux: add_inner needs a backend");
  for (const auto& inners : handovers()) {
    if (inners->backend() == backend) {
      inners_[device] = inners;
      return;
    }
  }
  inners_[device] = std::make_shared<Handover>(std::move(backend), device, getID(), log_.recorder(),
                                               log_.group());
}

Handover& DelegatingBackend::at(Device device) const {
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

std::vector<std::shared_ptr<Handover>> DelegatingBackend::handovers() const {
  std::vector<std::shared_ptr<Handover>> found;
  for (const auto& [device, inners] : inners_) {
    if (std::find(found.begin(), found.end(), inners) == found.end()) found.push_back(inners);
  }
  return found;
}

Handover::Ticket DelegatingBackend::count(Handover& inners, c10::Device device,
                                          const Call& call) const {
  if (log_.estimating() || call.op == Op::kCoalesced) return inners.uncounted();
  if (!call.is_transfer()) return inners.collective(device);
  if (call.peer < 0) return inners.any_source(call.tag, device);
  return inners.transfer(call.peer, call.tag, call.op == Op::kSend, device);
}

Handover::Ticket& DelegatingBackend::enter(Handover& inners, c10::Device device, const Call& call,
                                           std::optional<Handover::Ticket>& own) {
  if (!described_.load(std::memory_order_relaxed)) describe();
  if (!block_ || &inners != &default_handover()) return own.emplace(count(inners, device, call));
  // When a block is opened, the keys of its transfers are not known.
  if (call.is_transfer()) inners.keep_transfers();
  if (block_->ticket) {
    const bool counts = !call.is_transfer() && call.op != Op::kCoalesced && !log_.estimating();
    if (counts) inners.count_collective();
    return *block_->ticket;
  }
  block_->device = device;
  block_->ticket.emplace(count(inners, device, call));
  block_->ticket->inner()->backend->startCoalescing();
  return *block_->ticket;
}

StreamPassage DelegatingBackend::pass_gate(Inner& inner, c10::Device device, const Call& call,
                                           DeviceWatch* watch) {
  Gate* const open = gate();
  if (!open || !call.is_gated() || log_.estimating()) return {};
  if (!watch) {
    const GilRelease release;
    RECORD_USER_SCOPE("crux: wait for PCIe links");
    return {GateTicket(open, log_.group(), call.bytes), std::nullopt};
  }
  const Gate::Route* const route = open->route(log_.group(), call.bytes);
  return route ? pass_on_stream(*open, *route, inner, *watch, device, call) : StreamPassage();
}

StreamPassage DelegatingBackend::pass_gate(const Handover& inners, Inner& inner, c10::Device device,
                                           const Call& call, DeviceWatch* watch) {
  if (!block_ || &inners != &default_handover()) return pass_gate(inner, device, call, watch);
  // The whole block is issued on one stream, and its end has the ticket.
  StreamPassage& whole = block_->passing;
  const bool first = call.is_gated() && !std::exchange(block_->passed_gate, true);
  if (first) whole = pass_gate(inner, device, call, watch);
  if (!first && whole.aside) {
    const c10::impl::VirtualGuardImpl guard(whole.aside->device_type());
    follow(*whole.aside, guard.getStream(whole.aside->device()));
  }
  if (call.op == Op::kCoalesced) return std::move(whole);
  return {GateTicket(), whole.aside};
}

DelegatingBackend::WorkPtr DelegatingBackend::run(c10::Device device, const Call& call,
                                                  IssueRef issue) {
  Handover& inners = at(device.type());
  std::optional<Handover::Ticket> own;
  Handover::Ticket& ticket = enter(inners, device, call, own);
  Inner& inner = *ticket.inner();
  DeviceWatch* const watch = inner.watch(device);
  if (log_.is_captured(watch, call)) {
    WorkPtr work = issue(*inner.backend, inner.tag_of(call.tag));
    inners.captured(ticket);
    return work;
  }
  StreamPassage passing = pass_gate(inners, inner, device, call, watch);
  c10::OptionalStreamGuard on_aside;
  if (passing.aside) on_aside.reset_stream(*passing.aside);
  OperationLog::Pending pending = log_.begin(inner, device, call, watch, std::move(passing.ticket));
  WorkPtr work;
  try {
    work = issue(*inner.backend, inner.tag_of(call.tag));
    ticket.issued();
  } catch (...) {
    log_.failed(pending);
    throw;
  }
  if (passing.aside) {
    const c10::Stream current = *on_aside.original_stream();
    on_aside.reset();
    // Nobody can wait for it, so what follows does.
    if (!work && !(block_ && call.op != Op::kCoalesced)) follow(current, *passing.aside);
  }
  return log_.issued(inner, call, std::move(pending), work);
}

void DelegatingBackend::startCoalescing() {
  const BackendPtr inner = default_inner();
  block_.reset();
  if (inner->supportsCoalescing()) {
    block_.emplace();
  } else {
    inner->startCoalescing();
  }
  log_.start_block();
}

DelegatingBackend::WorkPtr DelegatingBackend::endCoalescing() {
  try {
    const bool begun = block_ && block_->ticket;
    const c10::Device device = begun ? block_->device : c10::Device(default_device());
    WorkPtr work = run(device, {Op::kCoalesced, 0},
                       [](c10d::Backend& inner, int) { return inner.endCoalescing(); });
    log_.end_block();
    block_.reset();
    return work;
  } catch (...) {
    block_.reset();
    log_.fail_block();
    throw;
  }
}

}  // namespace crux
