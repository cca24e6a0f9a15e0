// Counts what this process posts to its queue pairs with ibv_post_send(), which is an inline call
// through its context. Not seen: ibv_wr_*() of extended queue pairs, and programs that write a
// device's queues themselves (mlx5dv).
#pragma once

#include <infiniband/verbs.h>

namespace crux::transport::verbs {

// From now on. More than once is harmless.
void count_posts(ibv_context* context);
// Before the context is closed.
void forget_posts(ibv_context* context);

}  // namespace crux::transport::verbs
