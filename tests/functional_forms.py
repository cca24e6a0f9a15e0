"""The functional collectives that every workload compares, on one tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def functional_forms(t: torch.Tensor) -> list[Any]:
    """What each gives for ``t``, one-dimensional with a length that the ranks divide."""
    import torch.distributed._functional_collectives as fc

    group: Any = dist.group.WORLD
    return [
        fc.all_reduce(t, "sum", group) + 0,
        fc.all_gather_tensor(t, 0, group) + 0,
        fc.reduce_scatter_tensor(t, "sum", 0, group) + 0,
        fc.broadcast(t, 0, group) + 0,
        fc.all_to_all_single(t, None, None, group) + 0,
        [x + 0 for x in fc.all_reduce_coalesced([t, t + 1], "sum", group)],
        [x + 0 for x in fc.all_gather_into_tensor_coalesced([t, t + 1], group)],
        [x + 0 for x in fc.reduce_scatter_tensor_coalesced([t, t + 1], "sum", [0, 0], group)],
    ]
