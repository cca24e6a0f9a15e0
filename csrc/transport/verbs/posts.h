// Counts what this process posts to its queue pairs with ibv_post_send(), which is an inline call
// through its context. Not seen: ibv_wr_*() of extended queue pairs, and programs that write a
// device's queues themselves (mlx5dv).
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>

namespace crux::transport::verbs {

// Of all requests to send or write that were posted to one queue pair.
using PostedBytes = std::atomic<uint64_t>;

// From now on. More than once is harmless.
void count_posts(ibv_context* context);
// Before the context is closed.
void forget_posts(ibv_context* context);
// The counter of a queue pair, at 0; null if there is no place for one.
PostedBytes* begin_counting(const ibv_qp* handle);
// Before the queue pair is destroyed: afterwards another one may have the same address.
void end_counting(const ibv_qp* handle);

}  // namespace crux::transport::verbs
