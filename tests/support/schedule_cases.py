"""Small clusters that the tests of crux_torch.schedule share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from hypothesis import strategies as st
from scipy import sparse

from crux_torch.schedule.arrays import arrays_of, paths_of
from crux_torch.schedule.model import Burst, Cluster, Flow, Job
from crux_torch.schedule.papers import crux
from crux_torch.schedule.papers.crux import place
from crux_torch.schedule.papers.intensity import by_descending, unrouted_transfer_times_s

LINKS = tuple(f"l{i}" for i in range(6))


@st.composite
def clusters(draw: st.DrawFn, max_jobs: int = 7) -> Cluster:
    """Clusters of a few links, with ties, empty paths, single candidates and idle jobs."""
    capacity = {link: draw(st.sampled_from((1.0, 2.0, 10.0))) for link in LINKS}
    path = st.lists(st.sampled_from(LINKS), max_size=3, unique=True).map(tuple)
    flow = st.builds(
        Flow,
        st.sampled_from((0.0, 1.0, 2.0, 3.5)),
        st.lists(path, min_size=1, max_size=4).map(tuple),
    )
    names = draw(st.lists(st.sampled_from("abcdefghijk"), max_size=max_jobs, unique=True))
    jobs = tuple(
        Job(
            name=name,
            gpus=draw(st.integers(1, 8)),
            flops=draw(st.sampled_from((1.0, 2.0, 5.0, 100.0))),
            compute_s=draw(st.sampled_from((0.0, 0.5, 1.0, 3.0))),
            flows=tuple(draw(st.lists(flow, max_size=4))),
            bursts=draw(
                st.sampled_from(
                    ((Burst(1.0, 1.0),), (Burst(0.5, 1.0),), (Burst(0.25, 0.5), Burst(0.75, 0.5)))
                )
            ),
        )
        for name in names
    )
    return Cluster(capacity, jobs)


def select_paths(
    cluster: Cluster, order: Sequence[str] | None = None, *, sweeps: int = 0
) -> dict[str, tuple[int, ...]]:
    """Crux's paths by name, or those of jobs that choose in another order."""
    arrays = arrays_of(cluster)
    if order is None:
        return paths_of(arrays, crux.select_paths(arrays, sweeps=sweeps))
    index = {job.name: j for j, job in enumerate(arrays.jobs)}
    ranked = np.array([index[name] for name in order], np.int64)
    t_s = unrouted_transfer_times_s(arrays)
    return paths_of(arrays, place(arrays, ranked, t_s, sweeps=sweeps))


def compress(
    priority: Mapping[str, float],
    intensity: Mapping[str, float],
    links: Mapping[str, Collection[str]],
    levels: Sequence[int],
    *,
    seed: int = 0,
    orders: int = crux.ORDERS,
) -> dict[str, int]:
    """Crux's compression by name; equal priorities rank in the order of names."""
    names = sorted(priority)
    names = [names[j] for j in by_descending(np.array([priority[n] for n in names]))]
    known = sorted({link for used in links.values() for link in used})
    member = np.array([[link in links[name] for link in known] for name in names], float)
    level, _ = crux.compress_priorities(
        sparse.csr_array(member.reshape(len(names), len(known))),
        np.array([intensity[name] for name in names], np.float64),
        levels,
        seed=seed,
        orders=orders,
    )
    return dict(zip(names, level.tolist(), strict=True))
