"""CASSINI's Algorithm 2: placements ranked by compatibility, those with loops discarded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.schedule.model import Cluster, Flow, Job
from crux_torch.schedule.papers.cassini import Candidate, compatibility, ranked
from crux_torch.schedule.papers.cassini_grid import circle, compatibility_score

LINKS = ("l0", "l1", "l2", "l3")


def job(name: str, sending: float, links: Sequence[str], period_s: float = 1.0) -> Job:
    """Sends for a share of its period, at the rate of its links, after it has computed."""
    flow = Flow(sending * period_s, (tuple(links),))
    return Job(name, 8, 1e12, period_s * (1 - sending), (flow,))


def candidate(*jobs: Job) -> Candidate:
    path = {job.name: (0,) * len(job.flows) for job in jobs}
    return Candidate(Cluster(dict.fromkeys(LINKS, 1.0), jobs), path)


def used(one: Candidate) -> dict[str, set[str]]:
    return {job.name: set(job.flows[0].candidates[0]) for job in one.cluster.jobs}


def looped_by_brute_force(one: Candidate, name: str) -> bool:
    """Whether some cycle of two jobs or more joins links, in the part of ``name``.

    Links that carry the same jobs are one.
    """
    on = used(one)
    vertices = {frozenset(j for j in on if link in on[j]) for link in LINKS}
    vertices = {v for v in vertices if len(v) > 1}
    reached = {name}
    while True:
        more = set().union(*(v for v in vertices if v & reached), reached)
        if more == reached:
            break
        reached = more
    here = [v for v in vertices if v & reached]
    jobs = {j for v in here for j in v}
    # A connected bipartite graph is a tree if it has one edge less than vertices.
    return bool(here) and sum(map(len, here)) != len(jobs) + len(here) - 1


def score_by_brute_force(one: Candidate) -> float:
    """The mean of each link's best score over all rotations; jobs of equal periods."""
    scores = []
    for link in LINKS:
        own = [
            circle([(j.compute_s, j.compute_s + j.flows[0].bytes)], 1.0, 72)
            for j in one.cluster.jobs
            if link in j.flows[0].candidates[0]
        ]
        if len(own) < 2:
            continue
        scores.append(
            max(
                compatibility_score(
                    own[0] + sum(np.roll(c, a) for c, a in zip(own[1:], turn, strict=True))
                )
                for turn in itertools.product(range(0, 72, 2), repeat=len(own) - 1)
            )
        )
    return sum(scores) / len(scores) if scores else 1.0


@st.composite
def placements(draw: st.DrawFn) -> list[Candidate]:
    """Up to four placements of a newcomer beside up to three jobs; bursts of even angles."""
    sending = st.integers(3, 30).map(lambda twice: twice / 36)
    links = st.sets(st.sampled_from(LINKS), min_size=1, max_size=2).map(sorted)
    there = [job(f"j{i}", draw(sending), draw(links)) for i in range(draw(st.integers(0, 3)))]
    share = draw(sending)
    choices = draw(st.lists(links, min_size=1, max_size=4))
    return [candidate(*there, job("new", share, mine)) for mine in choices]


@settings(max_examples=60, deadline=None)
@given(placements())
def test_scores_and_loops_are_those_of_brute_force(choices) -> None:
    for one in choices:
        # With three jobs and more on a link, the search need not find the best rotation.
        crowd = max(sum(link in own for own in used(one).values()) for link in LINKS)
        found, best = compatibility(one, "new"), score_by_brute_force(one) if crowd < 4 else None
        assert found.loop == looped_by_brute_force(one, "new")
        if crowd < 3:
            assert found.score == pytest.approx(best, abs=1e-6)
        elif best is not None:
            assert best - 0.05 <= found.score <= best + 1e-6


@settings(max_examples=60, deadline=None)
@given(placements())
def test_the_ranking_is_by_score_and_leaves_loops_out(choices) -> None:
    order = ranked(choices, "new")
    found = [compatibility(one, "new") for one in choices]
    assert sorted(order) == [i for i, one in enumerate(found) if not one.loop]
    scores = [round(found[i].score, 9) for i in order]
    assert scores == sorted(scores, reverse=True)
    for a, b in itertools.pairwise(order):
        assert found[a].score > found[b].score + 1e-10 or a < b, "of equals the earlier"


def test_a_job_goes_to_the_link_where_it_fits() -> None:
    """Snapshots 1 and 5 of Table 2: beside a job that leaves room, not beside one that does not."""
    there = job("half", 0.5, ["l0"]), job("most", 0.9, ["l1"])
    choices = [candidate(*there, job("new", 0.45, [link])) for link in ("l1", "l0", "l2")]
    assert ranked(choices, "new") == [1, 2, 0]
    assert compatibility(choices[1], "new").score == pytest.approx(1.0)
    assert compatibility(choices[2], "new").score == 1.0, "it meets nobody"
    assert compatibility(choices[0], "new").score == pytest.approx(1 - 0.35, abs=0.02)


def test_two_links_that_join_the_same_jobs_in_two_ways_are_a_loop() -> None:
    a, b = job("a", 0.6, ["l0"]), job("b", 0.6, ["l1"])
    bridge = job("bridge", 0.6, ["l0", "l1"])
    tree = candidate(a, b, bridge, job("new", 0.6, ["l1"]))
    loop = candidate(a, b, bridge, job("new", 0.6, ["l0", "l1"]))
    far = candidate(a, b, bridge, job("x", 0.6, ["l0", "l1"]), job("new", 0.6, ["l3"]))
    assert not compatibility(tree, "new").loop
    assert compatibility(loop, "new").loop
    assert not compatibility(far, "new").loop, "others' loop is no fault of the placement"
    assert compatibility(far, "x").loop
    assert ranked([loop, tree, far], "new") == [1, 2]


def test_jobs_of_unlike_periods_make_no_loop_and_score_by_chance() -> None:
    rng = random.Random(1)
    jobs = [job(f"j{i}", 0.6, ["l0", "l1"], period_s=p) for i, p in enumerate((1.0, 1.37))]
    found = compatibility(candidate(*jobs), "j1")
    assert not found.loop
    excess = [max(0.0, (rng.random() < 0.6) + (rng.random() < 0.6) - 1.0) for _ in range(20_000)]
    assert found.score == pytest.approx(1 - sum(excess) / len(excess), abs=0.03)
