#include "posts.h"

#include <cerrno>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "queue_pairs.h"

namespace crux::transport::verbs {
namespace {

using PostSend = int (*)(ibv_qp*, ibv_send_wr*, ibv_send_wr**);

// The providers' own functions, which the contexts had. Never destroyed: contexts may outlive it.
struct Posts {
  std::shared_mutex mutex;
  std::unordered_map<const ibv_context*, PostSend> real;
};
Posts& posts() {
  static Posts* const instance = new Posts;
  return *instance;
}

bool sends(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE ||
         opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

uint64_t bytes_until(const ibv_send_wr* request, const ibv_send_wr* end) {
  uint64_t bytes = 0;
  for (; request != end && request != nullptr; request = request->next) {
    if (!sends(request->opcode)) continue;
    for (int i = 0; i < request->num_sge; ++i) bytes += request->sg_list[i].length;
  }
  return bytes;
}

PostSend real_post(const ibv_context* context) {
  const std::shared_lock lock(posts().mutex);
  const auto found = posts().real.find(context);
  return found == posts().real.end() ? nullptr : found->second;
}

int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) {
  const PostSend real = real_post(qp->context);
  if (real == nullptr) return EINVAL;  // the context was closed
  const QueuePairs::Shared pair = queue_pairs().find(qp);
  // Before the call: afterwards the requests may be another thread's.
  const uint64_t all = pair ? bytes_until(requests, nullptr) : 0;
  const int result = real(qp, requests, bad);
  if (pair)
    pair->posted_bytes.fetch_add(result == 0 ? all : bytes_until(requests, *bad),
                                 std::memory_order_relaxed);
  return result;
}

}  // namespace

void count_posts(ibv_context* context) {
  PostSend* const slot = &context->ops.post_send;
  const std::lock_guard lock(posts().mutex);
  if (*slot == nullptr || *slot == post_send) return;
  posts().real[context] = *slot;
  // Other threads of the program may be posting.
  __atomic_store_n(slot, &post_send, __ATOMIC_RELEASE);
}

void forget_posts(ibv_context* context) {
  const std::lock_guard lock(posts().mutex);
  const auto found = posts().real.find(context);
  if (found == posts().real.end()) return;
  __atomic_store_n(&context->ops.post_send, found->second, __ATOMIC_RELEASE);
  posts().real.erase(found);
}

}  // namespace crux::transport::verbs
