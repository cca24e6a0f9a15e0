"""An elastic job that loses a node and gets another one: its record follows, under one name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_fakes import Hosts, free_port, until
from training_job import BOUND_S, SCRIPT, environment

from crux_torch.agreement.records import JobRecord
from crux_torch.errors import StoreError
from crux_torch.report.cluster_status import read_status
from crux_torch.settings import Settings

pytestmark = pytest.mark.slow


class Node:
    """One ``cruxrun`` of an elastic job of one or two nodes, with one worker.

    Args:
        folder: where its worker writes.
        endpoint: of the job's rendezvous.
        store: of the cluster.
    """

    def __init__(self, folder: Path, endpoint: str, store: str) -> None:
        folder.mkdir()
        self._folder = folder
        command = [
            *(sys.executable, "-m", "cruxrun", "--nnodes=1:2", "--max-restarts=5"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=elastic"),
            *("--rdzv-conf=last_call_timeout=1,keep_alive_interval=1", "--monitor-interval=0.2"),
            *(SCRIPT, str(folder), "--steps=100000"),
        ]
        # Where torch's launchers share one store, a node that joins later waits for rank 0 in vain.
        store_of_its_own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        quick = {"CRUX_PROFILE_S": "3", "CRUX_LEASE_S": "4", "CRUX_TUNING": "profile_iterations=5"}
        self._errors = folder / "stderr"
        with self._errors.open("w") as errors:
            self._launcher = subprocess.Popen(
                command,
                env={
                    **environment(),
                    **store_of_its_own,
                    **quick,
                    "CRUX_STORE": store,
                    "CRUX_JOB": "elastic",
                },
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        return self._launcher.poll() is None

    @property
    def said(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        """SIGKILL to the launcher and its worker: nobody says goodbye."""
        pids = [int(file.read_text()) for file in self._folder.glob("*.pid")]
        for pid in (self._launcher.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._launcher.wait(BOUND_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str, str], Node]]:
    nodes: list[Node] = []

    def launch(name: str, endpoint: str, store: str) -> Node:
        nodes.append(Node(tmp_path / name, endpoint, store))
        return nodes[-1]

    yield launch
    for node in nodes:
        node.kill()


def test_the_record_follows_a_job_that_shrinks_and_grows(
    start: Callable[[str, str, str], Node],
) -> None:
    with Hosts(1) as hosts:
        hosts.wait_for_roles(1)
        port = free_port()
        store, endpoint = f"tcp://127.0.0.1:{hosts.port}", f"127.0.0.1:{port}"
        seen: list[JobRecord] = []

        def measured(ranks: int) -> bool:
            """Whether the job has a profile as one of so many ranks, in a life of its own."""
            with contextlib.suppress(StoreError):
                for record in read_status(Settings(store=store)).jobs:
                    anew = record.incarnation not in {r.incarnation for r in seen}
                    if record.gpus == ranks and record.profile is not None and anew:
                        seen.append(record)
                        return True
            return False

        def meets() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        first = start("first", endpoint, store)
        # Whoever comes first hosts the rendezvous, which must outlive the second.
        until(meets, BOUND_S, "the rendezvous")
        second = start("second", endpoint, store)
        until(lambda: measured(2), BOUND_S, "a profile of two ranks")
        second.kill()
        until(lambda: measured(1), BOUND_S, "a profile of the one that is left")
        start("third", endpoint, store)
        until(lambda: measured(2), BOUND_S, "a profile of two ranks again")
        assert first.runs, first.said
        assert {record.job for record in seen} == {"elastic"}
        assert [len(record.hosts) for record in seen] == [2, 1, 2]
        assert [bool(record.profile and record.profile.flows) for record in seen] == [
            True,
            False,
            True,
        ]
        # What two ranks measured says nothing of one rank.
        assert len({record.incarnation for record in seen}) == 3
