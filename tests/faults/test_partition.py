"""A job whose packets to the store, or the store's to it, are lost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_fakes import until
from etcd_server import Etcd, needs_etcd, wait_ready
from training_job import BOUND_S, Job

from faults.mix import CRUX, STEPS
from lab import netns

_OK, _REASON = netns.available()
pytestmark = [needs_etcd, pytest.mark.full, pytest.mark.skipif(not _OK, reason=_REASON)]

#: Of the job and of the store, in namespaces of their own with a cable between them.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
#: Nobody's. What is sent to it arrives and is dropped, as by a network that loses it.
NOBODY = "02:00:00:00:00:99"
_count = itertools.count()


class Cable:
    """Two namespaces, and what happens to packets from one to the other."""

    def __init__(self) -> None:
        prefix = netns.owner_prefix(os.getpid(), 1000 + next(_count))
        self.names = (f"{prefix}job", f"{prefix}store")

    def __enter__(self) -> Cable:
        job, store = self.names
        netns.run_batch("ip", "".join(f"netns add {name}\n" for name in self.names))
        netns.run_batch("ip", f"link add eth0 netns {job} type veth peer name eth0 netns {store}\n")
        for name, address in zip(self.names, ADDRESSES, strict=True):
            netns.run_batch(
                "ip", f"address add {address}/24 dev eth0\nlink set lo up\nlink set eth0 up\n", name
            )
        return self

    def __exit__(self, *_: object) -> None:
        netns.remove(self.names)

    def under(self, end: int) -> list[str]:
        """What starts a command at that end."""
        return ["ip", "netns", "exec", self.names[end]]

    def cut(self, sender: int) -> None:
        """Lose all that this end sends."""
        to = ADDRESSES[1 - sender]
        command = f"neighbour replace {to} lladdr {NOBODY} dev eth0 nud permanent\n"
        netns.run_batch("ip", command, self.names[sender])

    def heal(self, sender: int) -> None:
        command = f"neighbour del {ADDRESSES[1 - sender]} dev eth0\n"
        netns.run_batch("ip", command, self.names[sender])


@pytest.fixture
def cable() -> Iterator[Cable]:
    with Cable() as cable:
        yield cable


def has_plan(job: Job, plan: bool = True) -> bool:
    """Whether both ranks carry one out, or neither does."""
    found = []
    for rank in (0, 1):
        order, applied = job.status(rank).get("order"), job.status(rank).get("applied")
        if not order or not applied or order["measuring"]:
            return False
        found.append((order["plan_epoch"] > 0, applied["level"] is not None))
    return found == [(plan, plan)] * 2


@pytest.mark.parametrize("sender", [0, 1], ids=["to the store", "from the store"])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_job_that_loses_one_direction_trains_at_the_default_until_it_is_back(
    sender: int, cable: Cable, tmp_path: Path
) -> None:
    job = alone = None
    with Etcd(tmp_path, address=ADDRESSES[1], under=cable.under(1)) as etcd:
        try:
            wait_ready(etcd)
            store = {"CRUX_STORE": f"etcd://{etcd.endpoints}/cut", "CRUX_JOB": "cut"}
            options = (f"--steps={STEPS}", "--status")
            under = cable.under(0)
            job = Job("cruxrun", tmp_path / "cut", *options, under=under, **CRUX, **store)
            until(lambda: has_plan(job), BOUND_S, "a plan")
            cable.cut(sender)
            # The longest that it may take: the plan's validity, and a look.
            until(lambda: has_plan(job, False), BOUND_S, "the end of the plan")
            assert job.leader()["store"] != "ok"
            before = job.steps()
            until(lambda: job.steps() > before + 20, BOUND_S, "more steps")
            cable.heal(sender)
            until(lambda: has_plan(job), BOUND_S, "a plan")
            assert job.status()["errors"] == {}
            job.end()
            losses = job.losses()
            plain = (f"--steps={len(losses)}", "--sleep-s=0")
            alone = Job("torch.distributed.run", tmp_path / "alone", *plain)
            alone.end(after_its_steps=True)
            assert alone.losses() == losses
        finally:
            for each in (job, alone):
                if each is not None:
                    each.kill_everything()
