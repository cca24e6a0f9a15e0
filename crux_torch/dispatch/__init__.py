"""Which GPUs to give to a job: LiteGD's dispatching by bandwidth, and an exact search beside it."""
