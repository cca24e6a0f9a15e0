"""Crux: GPU-intensity-aware paths, priorities and their compression (paper §4)."""

from __future__ import annotations

from collections.abc import Sequence

from crux_torch.schedule.arrays import (
    Arrays,
    FloatArray,
    IntArray,
    arrays_of,
    choice_of,
    paths_of,
    traffic_matrix,
)
from crux_torch.schedule.bursts import single_bursts
from crux_torch.schedule.compression import check_levels, compress_ranked
from crux_torch.schedule.intensity import by_descending, intensities, unrouted_transfer_times_s
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.options import SchedulerOptions
from crux_torch.schedule.paths import place
from crux_torch.schedule.priority import Priorities, assign_priorities


def crux(cluster: Cluster, levels: Sequence[int], *, seed: int = 0, sweeps: int = 0) -> Decision:
    """Paths (§4.1), priorities (§4.2) and their compression onto ``levels`` (§4.3).

    Args:
        cluster: jobs and links.
        levels: usable priority levels, ascending; a higher one goes first.
        seed: of the topological orders that compression samples.
        sweeps: of path selection, see :func:`~crux_torch.schedule.paths.place`; the paper has none.

    Raises:
        ClusterError: a cluster that contradicts itself.
        ValueError: levels that are not ascending, or none.
    """
    check_levels(levels)
    arrays = arrays_of(cluster)
    choice = _select_paths(arrays, sweeps)
    traffic = traffic_matrix(arrays, choice)
    priorities = assign_priorities(arrays, traffic)
    order = by_descending(priorities.priority)
    compressed = compress_ranked(traffic[order], priorities.intensity[order], levels, seed=seed)
    return _decision(arrays, choice, priorities, order, compressed.tolist())


def crux_full(cluster: Cluster, options: SchedulerOptions, *, sweeps: int = 0) -> Decision:
    """Crux-full of §6.3: :func:`crux` as a scheduler."""
    return crux(_seen(cluster, options), options.levels, seed=options.seed, sweeps=sweeps)


def crux_pa(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-PA of §6.3: priority assignment only, on the default paths.

    Every job has a level of its own, 0 to the number of jobs less one; ``options.levels`` is not
    heeded.
    """
    arrays = arrays_of(_seen(cluster, options))
    return _unique_priorities(arrays, choice_of(arrays, options.default_path))


def crux_ps_pa(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Crux-PS-PA of §6.3: path selection and priority assignment, a level for every job."""
    arrays = arrays_of(_seen(cluster, options))
    return _unique_priorities(arrays, _select_paths(arrays))


def _seen(cluster: Cluster, options: SchedulerOptions) -> Cluster:
    return cluster if options.bursts else single_bursts(cluster)


def _select_paths(arrays: Arrays, sweeps: int = 0) -> IntArray:
    t_s = unrouted_transfer_times_s(arrays)
    return place(arrays, by_descending(intensities(arrays, t_s)), t_s, sweeps=sweeps)


def _unique_priorities(arrays: Arrays, choice: IntArray) -> Decision:
    priorities = assign_priorities(arrays, traffic_matrix(arrays, choice))
    order = by_descending(priorities.priority)
    return _decision(arrays, choice, priorities, order, range(len(order) - 1, -1, -1))


def _decision(
    arrays: Arrays,
    choice: IntArray,
    priorities: Priorities,
    order: IntArray,
    levels: Sequence[int],
) -> Decision:
    names = [job.name for job in arrays.jobs]

    def by_name(values: FloatArray) -> dict[str, float]:
        return dict(zip(names, values.tolist(), strict=True))

    return Decision(
        path=paths_of(arrays, choice),
        level=dict(zip((names[j] for j in order.tolist()), levels, strict=True)),
        priority=by_name(priorities.priority),
        intensity=by_name(priorities.intensity),
        correction=by_name(priorities.correction),
    )
