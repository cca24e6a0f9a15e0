#include "followed.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <string>

#include "live_work.h"

namespace crux::transport::verbs {
namespace {

int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** refused) {
  const auto pair = followed().pair(qp);
  if (!pair) return followed().ops(qp->context).post_send(qp, request, refused);
  const std::lock_guard lock(pair->mutex);
  try {
    return pair->live->post_send(qp, request, refused);
  } catch (const std::exception&) {
    *refused = request;
    return ENOMEM;
  }
}

int post_recv(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** refused) {
  const auto pair = followed().pair(qp);
  if (!pair) return followed().ops(qp->context).post_recv(qp, request, refused);
  const std::lock_guard lock(pair->mutex);
  try {
    return pair->live->post_recv(qp, request, refused);
  } catch (const std::exception&) {
    *refused = request;
    return ENOMEM;
  }
}

int poll_cq(ibv_cq* cq, int count, ibv_wc* out) {
  const auto known = followed().cq(cq);
  return known ? known->poll(count, out) : followed().ops(cq->context).poll_cq(cq, count, out);
}

// Takes an entry of the send queue that is not seen here.
int bind_mw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind) {
  if (const auto pair = followed().pair(qp)) {
    const std::lock_guard lock(pair->mutex);
    pair->live->lost = "memory windows are bound to it";
  }
  return followed().ops(qp->context).bind_mw(qp, mw, bind);
}

bool asked_for() {
  const char* const text = ::secure_getenv("CRUX_LIVE_QP");
  if (text == nullptr) return false;
  const std::string value = text;
  return !value.empty() && value != "0" && value != "false" && value != "no" && value != "off";
}

}  // namespace

Followed& followed() {
  static Followed* const instance = [] {
    auto* const made = new Followed;
    made->enable(asked_for());
    return made;
  }();
  return *instance;
}

void CompletionQueue::attach(const std::shared_ptr<QueuePair>& pair) {
  const std::lock_guard lock(mutex_);
  pairs_[pair->number] = pair;
}

void CompletionQueue::detach(const QueuePair& pair) {
  const std::lock_guard lock(mutex_);
  const auto found = pairs_.find(pair.number);
  if (found != pairs_.end() && found->second.get() == &pair) pairs_.erase(found);
}

void CompletionQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void CompletionQueue::reopen() {
  const std::lock_guard lock(mutex_);
  closed_ = false;
}

bool CompletionQueue::take_spare() {
  // ibv_resize_cq() has taken it back.
  return has_spare_ && handle_->cqe == cqe_ && !spare_is_taken_.exchange(true);
}

void CompletionQueue::report(uint64_t wr_id, ibv_wc_status status, uint32_t number) {
  ibv_wc completion{};
  completion.wr_id = wr_id;
  completion.status = status;
  completion.qp_num = number;
  const std::lock_guard lock(reports_mutex_);
  reports_.push_back(completion);
  has_reports_ = true;
}

bool CompletionQueue::is_callers(const ibv_wc& completion) {
  const auto found = pairs_.find(completion.qp_num);
  if (found == pairs_.end()) return true;
  const std::lock_guard lock(found->second->mutex);
  return found->second->live->completed(completion);
}

int CompletionQueue::take(int count, ibv_wc* out) {
  const int got = poll_(handle_, count, out);
  if (got <= 0) return got;
  ibv_wc* const end = std::stable_partition(
      out, out + got, [this](const ibv_wc& completion) { return is_callers(completion); });
  return static_cast<int>(end - out);
}

void CompletionQueue::look_after_gates() {
  attend_ = false;
  bool again = false;
  for (const auto& [number, pair] : pairs_) {
    const std::lock_guard lock(pair->mutex);
    again = pair->live->attend(pair->handle) || again;
  }
  if (again) attend_ = true;
}

int CompletionQueue::poll(int count, ibv_wc* out) {
  const std::lock_guard lock(mutex_);
  if (attend_) look_after_gates();
  if (has_reports_) {
    const std::lock_guard reports_lock(reports_mutex_);
    waiting_.insert(waiting_.end(), reports_.begin(), reports_.end());
    reports_.clear();
    has_reports_ = false;
  }
  int filled = 0;
  for (; filled < count && !waiting_.empty(); ++filled) {
    out[filled] = waiting_.front();
    waiting_.pop_front();
  }
  if (filled == count) return filled;
  const int got = take(count - filled, out + filled);
  return got < 0 && filled == 0 ? got : filled + std::max(got, 0);
}

void CompletionQueue::collect() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  ibv_wc batch[32];
  for (;;) {
    const int got = poll_(handle_, 32, batch);
    if (got <= 0) return;
    for (const ibv_wc* completion = batch; completion != batch + got; ++completion) {
      if (is_callers(*completion)) waiting_.push_back(*completion);
    }
  }
}

void Followed::opened(ibv_context* context) {
  if (!enabled_) return;
  const std::lock_guard lock(mutex_);
  contexts_[context] = context->ops;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.poll_cq = poll_cq;
  context->ops.bind_mw = bind_mw;
}

void Followed::closes(ibv_context* context) {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(context);
  if (found == contexts_.end()) return;
  context->ops = found->second;
  contexts_.erase(found);
}

bool Followed::has(const ibv_context* context) const {
  const std::shared_lock lock(mutex_);
  return contexts_.count(context) != 0;
}

ibv_context_ops Followed::ops(const ibv_context* context) const {
  const std::shared_lock lock(mutex_);
  return contexts_.at(context);
}

ibv_cq* Followed::create_cq(const crux_verbs_calls& real, ibv_context* context, int cqe,
                            void* cq_context, ibv_comp_channel* channel, int comp_vector) {
  if (!has(context)) return real.create_cq(context, cqe, cq_context, channel, comp_vector);
  bool has_spare = channel == nullptr;
  ibv_cq* handle = nullptr;
  if (has_spare) handle = real.create_cq(context, cqe + 1, cq_context, channel, comp_vector);
  if (handle == nullptr) {
    has_spare = false;
    handle = real.create_cq(context, cqe, cq_context, channel, comp_vector);
  }
  // With a channel, a completion that was taken here would ring no bell.
  if (handle == nullptr || channel != nullptr) return handle;
  auto cq = std::make_shared<CompletionQueue>(handle, ops(context), has_spare);
  const std::lock_guard lock(mutex_);
  cqs_[handle] = std::move(cq);
  return handle;
}

void Followed::cq_closes(const ibv_cq* handle, const std::shared_ptr<CompletionQueue>& cq) {
  const std::lock_guard lock(mutex_);
  const auto found = cqs_.find(handle);
  // Its address may be another's already.
  if (found != cqs_.end() && found->second == cq) cqs_.erase(found);
}

void Followed::created(const std::shared_ptr<QueuePair>& pair, const ibv_qp_init_attr& attributes) {
  if (!has(pair->context)) return;
  const auto send_cq = cq(attributes.send_cq), recv_cq = cq(attributes.recv_cq);
  {
    const std::lock_guard lock(pair->mutex);
    if (attributes.qp_type != IBV_QPT_RC) {
      pair->not_followed = "it is not of the reliable connected type";
    } else if (attributes.srq != nullptr) {
      pair->not_followed = "its receives come from a shared queue";
    } else if (!send_cq || !recv_cq) {
      pair->not_followed = "its completion queue has a channel or the extended interface";
    }
    if (pair->not_followed != nullptr) return;
    pair->live = std::make_unique<LiveWork>(attributes, ops(pair->context), send_cq, recv_cq);
  }
  send_cq->attach(pair);
  recv_cq->attach(pair);
  const std::lock_guard lock(mutex_);
  pairs_[pair->handle] = pair;
}

void Followed::destroyed(const QueuePair& pair) {
  if (!pair.live) return;
  pair.live->send_cq->detach(pair);
  pair.live->recv_cq->detach(pair);
  const std::lock_guard lock(mutex_);
  const auto found = pairs_.find(pair.handle);
  if (found != pairs_.end() && found->second.get() == &pair) pairs_.erase(found);
}

std::shared_ptr<QueuePair> Followed::pair(const ibv_qp* handle) const {
  const std::shared_lock lock(mutex_);
  const auto found = pairs_.find(handle);
  return found == pairs_.end() ? nullptr : found->second;
}

std::shared_ptr<CompletionQueue> Followed::cq(const ibv_cq* handle) const {
  const std::shared_lock lock(mutex_);
  const auto found = cqs_.find(handle);
  return found == cqs_.end() ? nullptr : found->second;
}

}  // namespace crux::transport::verbs
