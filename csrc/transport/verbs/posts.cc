#include <array>
#include <atomic>
#include <cerrno>

#include "queue_pair.h"

namespace crux::transport::verbs {
namespace {

using PostSend = int (*)(ibv_qp*, ibv_send_wr*, ibv_send_wr**);

// ibv_post_send() of several threads, and of a signal handler, reads the tables below, so they have
// no locks. What finds no place in them is not counted.

// The providers' own functions, which the contexts had.
struct OfContext {
  std::atomic<const ibv_context*> context{nullptr};
  std::atomic<PostSend> real{nullptr};
};
std::array<OfContext, 64> contexts;

struct OfQueuePair {
  std::atomic<const ibv_qp*> handle{nullptr};
  PostedBytes bytes{0};
};
constexpr size_t kQueuePairs = 1 << 15;
std::array<OfQueuePair, kQueuePairs> queue_pairs;
// In place of a handle that was dropped: the search for another one goes on behind it.
const ibv_qp* const kDropped = reinterpret_cast<const ibv_qp*>(&queue_pairs);

// Calls `visit` with each place where `handle` may be, in order, until it returns true or the
// rest is empty.
template <class Visit>
void search(const ibv_qp* handle, Visit visit) {
  const size_t first = reinterpret_cast<uintptr_t>(handle) * 0x9E3779B97F4A7C15u >> 49;
  static_assert(kQueuePairs == size_t{1} << (64 - 49));
  for (size_t i = 0; i < kQueuePairs; ++i) {
    OfQueuePair& place = queue_pairs[(first + i) % kQueuePairs];
    const ibv_qp* const there = place.handle.load(std::memory_order_acquire);
    if (visit(place, there) || there == nullptr) return;
  }
}

PostedBytes* posted_bytes(const ibv_qp* handle) {
  PostedBytes* found = nullptr;
  search(handle, [&](OfQueuePair& place, const ibv_qp* there) {
    if (there == handle) found = &place.bytes;
    return found != nullptr;
  });
  return found;
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
  for (const OfContext& each : contexts) {
    if (each.context.load(std::memory_order_acquire) != context) continue;
    if (const PostSend real = each.real.load(std::memory_order_acquire)) return real;
  }
  return nullptr;
}

int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) {
  const PostSend real = real_post(qp->context);
  if (real == nullptr) return EINVAL;  // the context was closed
  PostedBytes* const posted = posted_bytes(qp);
  // Before the call: afterwards the requests may be another thread's.
  const uint64_t all = posted != nullptr ? bytes_until(requests, nullptr) : 0;
  const int result = real(qp, requests, bad);
  if (posted != nullptr)
    posted->fetch_add(result == 0 ? all : bytes_until(requests, *bad), std::memory_order_relaxed);
  return result;
}

}  // namespace

void count_posts(ibv_context* context) {
  PostSend* const slot = &context->ops.post_send;
  const PostSend real = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  if (real == nullptr || real == post_send) return;
  for (OfContext& each : contexts) {
    const ibv_context* there = nullptr;
    const bool ours = each.context.compare_exchange_strong(there, context) || there == context;
    if (!ours) continue;
    each.real.store(real, std::memory_order_release);
    // Other threads of the program may be posting.
    __atomic_store_n(slot, &post_send, __ATOMIC_RELEASE);
    return;
  }
}

void forget_posts(ibv_context* context) {
  for (OfContext& each : contexts) {
    if (each.context.load(std::memory_order_acquire) != context) continue;
    if (const PostSend real = each.real.exchange(nullptr))
      __atomic_store_n(&context->ops.post_send, real, __ATOMIC_RELEASE);
    each.context.store(nullptr, std::memory_order_release);
  }
}

PostedBytes* begin_counting(const ibv_qp* handle) {
  PostedBytes* taken = nullptr;
  if (PostedBytes* const known = posted_bytes(handle)) {
    taken = known;
  } else {
    search(handle, [&](OfQueuePair& place, const ibv_qp* there) {
      const bool is_free = there == nullptr || there == kDropped;
      if (is_free && place.handle.compare_exchange_strong(there, handle)) taken = &place.bytes;
      return taken != nullptr;
    });
  }
  if (taken != nullptr) taken->store(0, std::memory_order_relaxed);
  return taken;
}

void end_counting(const ibv_qp* handle) {
  search(handle, [&](OfQueuePair& place, const ibv_qp* there) {
    if (there != handle) return false;
    place.handle.store(kDropped, std::memory_order_release);
    return true;
  });
}

}  // namespace crux::transport::verbs
