"""Switches of NCCL communicators: what runs on the device meanwhile, and who waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from control_fakes import until
from cuda_rig import control

from crux_torch.backend.handover import Groups
from on_rig.ranks import FLAVOURS, all_reduce, alone, crux, fresh, ones, synchronize

#: Seconds that operations may wait for a switch: one that is to succeed, and one that is not.
LONG_S, SHORT_S = 120.0, 3.0
#: Seconds between two steps. Without a pause the program would run ahead of the rig's device, whose
#: queue has no bound, and torch looks through all of that queue for each operation.
STEP_S = 0.001


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


class Training:
    """Groups of one rank that a thread issues operations to until the end, one after the other."""

    def __init__(self, flavour: str, of: int) -> None:
        self.groups = Groups(patience_s=LONG_S)
        self.backends = [crux(alone(flavour)) for _ in range(of)]
        for made in self.backends:
            all_reduce(made, ones()).wait()
            self.groups.add(made, dist.HashStore(), 0)
        synchronize()
        control.clear()
        self.steps = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        control.release()
        self._over.set()
        self._thread.join()
        synchronize()
        self.groups.stop()
        for made in self.backends:
            made.shutdown()

    def _train(self) -> None:
        tensors = [ones() for _ in self.backends]
        while not self._over.is_set():
            for made, tensor in zip(self.backends, tensors, strict=True):
                all_reduce(made, tensor)
            self.steps += 1
            if self.steps % 10 == 0:
                for tensor in tensors:
                    tensor.fill_(1.0)
            time.sleep(STEP_S)

    def status(self, group: int = 0) -> Any:
        index = self.backends[group].group_index
        return next(status for status in self.groups.status() if status.group == index)


@FLAVOURS
def test_nothing_runs_while_communicators_are_made_and_freed(flavour: str) -> None:
    with Training(flavour, 3) as training:
        for generation in range(1, 4):
            training.groups.request(generation)
            until(lambda: training.groups.wait(1.0), what="the switches")
            for group in range(3):
                status = training.status(group)
                assert (status.state, status.generation) == ("idle", generation), status
    made = [each["op"] for each in control.issued() if each["op"] in ("init", "destroy")]
    assert made.count("init") >= 9
    assert control.beside() == []


@FLAVOURS
def test_a_device_that_does_not_become_idle_keeps_its_communicators(flavour: str) -> None:
    """To free one beside a kernel that waits for a peer would wait for it as long."""
    with Training(flavour, 2) as training:
        training.groups.patience_s = SHORT_S
        control.inject("hold", "all_reduce")
        training.groups.request(1)
        until(lambda: training.groups.wait(1.0), what="the end of the switches")
        failed = training.status()
        assert failed.state == "failed"
        assert "idle" in (failed.error or "")
        assert all(each["op"] not in ("init", "destroy") for each in control.issued())
        control.release()
        before = training.steps
        until(lambda: training.steps > before, what="a step")
        training.groups.patience_s = LONG_S
        training.groups.request(2)
        until(lambda: training.groups.wait(1.0), what="the switches")
        assert [training.status(group).state for group in range(2)] == ["idle", "idle"]
    assert control.beside() == []


@FLAVOURS
@pytest.mark.parametrize("fault", ["error", "hold"])
def test_who_can_not_make_the_next_one_trains_on(flavour: str, fault: str) -> None:
    """Without an error in training, whose first operation would have made it."""
    with Training(flavour, 1) as training:
        training.groups.patience_s = SHORT_S
        control.inject(fault, "init")
        training.groups.request(1)
        until(lambda: training.groups.wait(1.0), what="the end of the switch")
        assert training.status().state == "failed", training.status()
        before = training.steps
        until(lambda: training.steps > before, what="a step")
        control.release()
        training.groups.patience_s = LONG_S
        training.groups.request(2)
        until(lambda: training.groups.wait(1.0), what="the switch")
        assert training.status().state == "idle", training.status()
