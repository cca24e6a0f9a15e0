"""GPU-intensity-based path selection (paper §4.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from crux_torch.schedule.arrays import (
    Arrays,
    ClusterError,
    FloatArray,
    IntArray,
    arrays_of,
    layers,
    paths_of,
    ranges,
)
from crux_torch.schedule.intensity import (
    by_descending,
    intensities,
    solo_periods_s,
    unrouted_transfer_times_s,
)
from crux_torch.schedule.model import Cluster

#: Sums are taken over whole steps of 2^-32, which floats add exactly: the order of a path's links
#: does not matter then.
_STEPS = 2.0**32
#: Flows placed at a time below which plain Python is faster than array operations.
_SMALL_WAVE = 6
#: Path entries that are laid out in memory at once.
_CHUNK_ENTRIES = 1 << 23


def select_paths(
    cluster: Cluster, order: Sequence[str] | None = None
) -> dict[str, tuple[int, ...]]:
    """Gives every job, the most GPU-intensive first, the least congested of its candidate paths.

    Each flow of a job, the largest first, takes the candidate whose most utilised link is least
    utilised once the flow is on it; then the one with the smallest sum over its links; then the
    first. A link's utilisation is the share of its capacity that the jobs placed so far ask for
    while they meet nobody: bytes of an iteration over the job's own period.

    Args:
        order: names of all jobs, first choice first; default: descending intensity, with t_j
            as :func:`~crux_torch.schedule.intensity.unrouted_transfer_times_s` estimates it.

    Returns:
        For each job the index of the candidate that each of its flows takes.

    Raises:
        ClusterError: a cluster that contradicts itself, or an order that is not of its jobs.
    """
    arrays = arrays_of(cluster)
    t_s = unrouted_transfer_times_s(arrays)
    if order is None:
        ranked = by_descending(intensities(arrays, t_s))
    else:
        index = {job.name: j for j, job in enumerate(arrays.jobs)}
        if sorted(order) != [job.name for job in arrays.jobs]:
            raise ClusterError("the order of path selection must name every job once")
        ranked = np.array([index[name] for name in order], np.int64)
    return paths_of(arrays, place(arrays, ranked, t_s))


def place(arrays: Arrays, order: IntArray, t_s: FloatArray) -> IntArray:
    """The candidate that each flow takes when jobs choose in ``order``.

    Flows that have no link in common among all their candidates do not see each other's choice,
    so they are placed together, a wave at a time; the result is that of one after the other.

    Args:
        order: job indices, first choice first.
        t_s: t_j of every job, which tells its period.
    """
    period_s = solo_periods_s(arrays, t_s)[arrays.flow_job]
    rate_Bps = np.divide(
        arrays.flow_bytes, period_s, out=np.zeros(len(period_s)), where=period_s > 0
    )
    flows = _flows_in_order(arrays, order)
    wave = _waves(arrays, flows)
    if wave is None:
        return _place_one_by_one(arrays, flows, rate_Bps)
    return _place_in_waves(arrays, flows, wave, rate_Bps)


def _flows_in_order(arrays: Arrays, order: IntArray) -> IntArray:
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return np.lexsort((-arrays.flow_bytes, rank[arrays.flow_job]))


def _waves(arrays: Arrays, flows: IntArray) -> IntArray | None:
    """For each of ``flows`` the wave in which it is placed: after all that it could depend on.

    None where so many flows could use one group of links that waves would be small.
    """
    start, group = _link_groups(arrays)
    sets = arrays.flow_set[flows]
    count = start[sets + 1] - start[sets]
    group = group[ranges(start[sets], count)]
    flow = np.repeat(np.arange(len(flows)), count)
    if len(flows) < _SMALL_WAVE * np.bincount(group + 1)[1:].max(initial=0):
        return None
    flow, group = flow[group >= 0], group[group >= 0]
    by_group = np.argsort(group, kind="stable")
    flow, group = flow[by_group], group[by_group]
    # Each flow waits for the one before it in each of its groups.
    follows = (group[1:] == group[:-1]) & (flow[1:] != flow[:-1])
    return layers(flow[:-1][follows], flow[1:][follows], len(flows))


def _link_groups(arrays: Arrays) -> tuple[IntArray, IntArray]:
    """The groups of links that each candidate set may use, as starts and groups.

    Links that are alternatives to each other, at the same hop of two candidates of a set, form
    one group: a switch's uplinks, say. Two sets without a common group have no common link. The
    link that stands for an empty path is never full: its group is -1, and nobody waits for it.
    """
    sets = len(arrays.set_start) - 1
    length = np.diff(arrays.path_start)
    entries = arrays.path_start[arrays.set_start]
    hop = np.arange(len(arrays.path_links)) - np.repeat(arrays.path_start[:-1], length)
    hops = np.zeros(sets, np.int64)
    if sets:
        hops = np.maximum.reduceat(length, arrays.set_start[:-1])
    start = np.concatenate(([0], np.cumsum(hops)))
    column = np.repeat(start[:-1], np.diff(entries)) + hop
    nowhere = len(arrays.capacity_Bps) - 1
    real = arrays.path_links != nowhere
    column, link = column[real], arrays.path_links[real]
    # Any one link stands for its column; all others of the column are joined to it.
    standing = np.full(int(start[-1]), nowhere)
    standing[column] = link
    stands = standing[column]
    joined = stands != link
    graph = sparse.coo_array(
        (np.ones(int(joined.sum()), np.int8), (stands[joined], link[joined])),
        shape=(nowhere + 1, nowhere + 1),
    )
    _, label = sparse.csgraph.connected_components(graph, directed=False)
    return start, np.where(standing == nowhere, -1, label[standing]).astype(np.int64)


def _place_in_waves(
    arrays: Arrays, flows: IntArray, wave: IntArray, rate_Bps: FloatArray
) -> IntArray:
    by_wave = np.argsort(wave, kind="stable")
    flows, wave = flows[by_wave], wave[by_wave]
    bounds = np.searchsorted(wave, np.arange(int(wave.max(initial=-1)) + 2))
    entries = np.diff(arrays.path_start[arrays.set_start])[arrays.flow_set[flows]]
    entries_until = np.concatenate(([0], np.cumsum(entries)))[bounds]
    load_Bps = np.zeros(len(arrays.capacity_Bps))
    choice = np.zeros(len(flows), np.int64)
    w = 0
    while w < len(bounds) - 1:
        until = int(np.searchsorted(entries_until, entries_until[w] + _CHUNK_ENTRIES)) - 1
        until = min(max(until, w + 1), len(bounds) - 1)
        _place_chunk(arrays, flows, bounds[w : until + 1], rate_Bps, load_Bps, choice)
        w = until
    return choice


def _place_chunk(
    arrays: Arrays,
    flows: IntArray,
    bounds: IntArray,
    rate_Bps: FloatArray,
    load_Bps: FloatArray,
    choice: IntArray,
) -> None:
    """Places the flows of some waves, laid out as one run of (flow, candidate, link) entries."""
    offset = int(bounds[0])
    chunk = flows[offset : int(bounds[-1])]
    sets = arrays.flow_set[chunk]
    paths = np.diff(arrays.set_start)[sets]
    path = ranges(arrays.set_start[sets], paths)
    length = np.diff(arrays.path_start)[path]
    link = arrays.path_links[ranges(arrays.path_start[path], length)]
    path_at = np.concatenate(([0], np.cumsum(paths)))
    entry_at = np.concatenate(([0], np.cumsum(length)))
    demand = np.repeat(np.repeat(rate_Bps[chunk], paths), length)
    per_Bps = 1.0 / arrays.capacity_Bps
    scale = per_Bps[link]
    for a, b in zip((bounds[:-1] - offset).tolist(), (bounds[1:] - offset).tolist(), strict=True):
        p, q = int(path_at[a]), int(path_at[b])
        e, f = int(entry_at[p]), int(entry_at[q])
        utilisation = (load_Bps[link[e:f]] + demand[e:f]) * scale[e:f]
        starts = entry_at[p:q] - e
        busiest = np.maximum.reduceat(utilisation, starts)
        total = np.add.reduceat(np.rint(utilisation * _STEPS), starts)
        of_flow = path_at[a:b] - p
        count = paths[a:b]
        beaten = busiest > np.repeat(np.minimum.reduceat(busiest, of_flow), count)
        total[beaten] = np.inf
        best = np.flatnonzero(total == np.repeat(np.minimum.reduceat(total, of_flow), count))
        # The first of equals: where a flow's range of candidates begins among the best ones.
        taken = best[np.searchsorted(best, of_flow)]
        choice[chunk[a:b]] = taken - of_flow
        first, count = entry_at[p + taken], length[p + taken]
        used = link[ranges(first, count)]
        np.add.at(load_Bps, used, np.repeat(rate_Bps[chunk[a:b]], count))


def _place_one_by_one(arrays: Arrays, flows: IntArray, rate_Bps: FloatArray) -> IntArray:
    load_Bps = [0.0] * len(arrays.capacity_Bps)
    per_Bps = (1.0 / arrays.capacity_Bps).tolist()
    links = arrays.path_links.tolist()
    path_start, set_start = arrays.path_start.tolist(), arrays.set_start.tolist()
    candidates: dict[int, list[list[int]]] = {}
    choice = np.zeros(len(flows), np.int64)
    sets = arrays.flow_set[flows].tolist()
    rates = rate_Bps[flows].tolist()
    for flow, s, rate in zip(flows.tolist(), sets, rates, strict=True):
        if s not in candidates:
            candidates[s] = [
                links[path_start[p] : path_start[p + 1]]
                for p in range(set_start[s], set_start[s + 1])
            ]
        taken, least = 0, (np.inf, np.inf)
        for c, path in enumerate(candidates[s]):
            busiest, total = 0.0, 0.0
            for link in path:
                utilisation = (load_Bps[link] + rate) * per_Bps[link]
                busiest = max(busiest, utilisation)
                total += round(utilisation * _STEPS)
            if (busiest, total) < least:
                taken, least = c, (busiest, total)
        for link in candidates[s][taken]:
            load_Bps[link] += rate
        choice[flow] = taken
    return choice
