"""Small clusters that the tests of crux_torch.schedule share."""

from __future__ import annotations

from hypothesis import strategies as st

from crux_torch.schedule.model import Burst, Cluster, Flow, Job

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
                    (
                        (Burst(1.0, 1.0),),
                        (Burst(0.5, 1.0),),
                        (Burst(0.25, 0.5), Burst(0.75, 0.5)),
                    )
                )
            ),
        )
        for name in names
    )
    return Cluster(capacity, jobs)


def on_links(**links: str) -> dict[str, set[str]]:
    """Links of each job, written as one letter a link."""
    return {job: set(names) for job, names in links.items()}
