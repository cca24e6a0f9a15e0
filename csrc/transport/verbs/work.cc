#include "work.h"

#include <algorithm>

namespace crux::transport::verbs {
namespace {

uint64_t bytes_of(const ibv_sge* pieces, int count) {
  uint64_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += pieces[i].length;
  return bytes;
}

bool writes(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

}  // namespace

HeldSend::HeldSend(const ibv_send_wr& request)
    : request_(request), pieces_(request.sg_list, request.sg_list + request.num_sge) {
  request_.next = nullptr;
  if (!(request.send_flags & IBV_SEND_INLINE)) return;
  for (const ibv_sge& piece : pieces_) {
    const auto* const data = reinterpret_cast<const uint8_t*>(piece.addr);
    inline_data_.insert(inline_data_.end(), data, data + piece.length);
  }
}

ibv_send_wr& HeldSend::request() {
  uint64_t offset = 0;
  if (request_.send_flags & IBV_SEND_INLINE) {
    for (ibv_sge& piece : pieces_) {
      piece.addr = reinterpret_cast<uintptr_t>(inline_data_.data()) + offset;
      offset += piece.length;
    }
  }
  request_.sg_list = pieces_.data();
  return request_;
}

void Work::sends(const ibv_send_wr& request) {
  sends_.push_back({request.wr_id, all_signaled_ || (request.send_flags & IBV_SEND_SIGNALED),
                    writes(request.opcode)});
  bytes_sent += bytes_of(request.sg_list, request.num_sge);
}

void Work::take_back_sends(size_t count) {
  sends_.resize(sends_.size() - std::min(count, sends_.size()));
}

void Work::sends_marker() {
  sends_.push_back({marker_id(), true, true});
  marker_is_out_ = true;
}

void Work::take_back_marker() {
  take_back_sends(1);
  marker_is_out_ = false;
}

Work::Of Work::sent(uint64_t wr_id) {
  const auto first =
      std::find_if(sends_.begin(), sends_.end(), [](const Send& send) { return send.signaled; });
  if (first == sends_.end() || first->wr_id != wr_id) return Of::kUnknown;
  peer_takes_writes_ = peer_takes_writes_ || std::any_of(sends_.begin(), first + 1,
                                                         [](const Send& s) { return s.writes; });
  const bool is_marker = marker_is_out_ && wr_id == marker_id();
  if (is_marker) marker_is_out_ = false;
  sends_.erase(sends_.begin(), first + 1);
  return is_marker ? Of::kMarker : Of::kCaller;
}

void Work::receives(const ibv_recv_wr& request, bool is_posted) {
  receives_.push_back({request.wr_id, {request.sg_list, request.sg_list + request.num_sge}});
  if (is_posted) ++posted_receives_;
}

void Work::take_back_receives(size_t count) {
  count = std::min(count, receives_.size());
  for (; count > 0; --count) receives_.pop_back();
  posted_receives_ = std::min(posted_receives_, receives_.size());
}

bool Work::received(uint64_t wr_id) {
  if (posted_receives_ == 0 || receives_.front().wr_id != wr_id) return false;
  receives_.pop_front();
  --posted_receives_;
  return true;
}

const Receive* Work::next_receive() const {
  return posted_receives_ < receives_.size() ? &receives_[posted_receives_] : nullptr;
}

std::vector<uint64_t> Work::drop_receives() {
  std::vector<uint64_t> ids;
  for (const Receive& receive : receives_) ids.push_back(receive.wr_id);
  receives_.clear();
  posted_receives_ = 0;
  return ids;
}

void Work::clear() {
  sends_.clear();
  receives_.clear();
  held.clear();
  posted_receives_ = 0;
  marker_is_out_ = false;
}

}  // namespace crux::transport::verbs
