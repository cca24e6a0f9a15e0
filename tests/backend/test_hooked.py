"""Groups that keep torch's own backend: which they are, and what their hooks survive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drained import drain
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg

from crux_torch.apply.wire import QueuePairs, all_can_move
from crux_torch.backend import inner_backends, register
from crux_torch.errors import CruxError
from crux_torch.measure.records import OPS, STATUSES

_C = pytest.importorskip("crux_torch._C")
needs_hooks = pytest.mark.skipif(
    not hasattr(_C, "HookedGroup"), reason="torch has no hooks before 2.15"
)


def group(**options: Any) -> tuple[Any, Any]:
    """One over a backend that moves nothing, recorded by hooks."""
    given = fake_pg.FakeProcessGroup.Options()
    for name, value in options.items():
        setattr(given, name, value)
    backend = fake_pg.FakeProcessGroup._create_internal(0, 2, given)
    made: Any = c10d.ProcessGroup(dist.HashStore(), 0, 2)
    made._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)
    made._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.CUSTOM, backend)
    made._set_group_name("hooked")
    recorder = _C.process_recorder(65536)
    recorder.timing = True
    recorder.drain(1 << 30)
    return made, _C.HookedGroup.attach(made, backend, "cpu", True, recorder)


@needs_hooks
def test_a_refused_operation_is_failed_and_the_next_is_not() -> None:
    made, _ = group(error_on_collective=True)
    with pytest.raises(RuntimeError):
        made.allreduce([torch.ones(3)])
    other, _ = group()
    other.allreduce([torch.ones(5)]).wait()
    rows = drain(_C.process_recorder(1), 2)
    told = [(OPS[row["op"]], row["bytes"], STATUSES[row["status"]]) for row in rows]
    assert told == [("allreduce", 12, "failed"), ("allreduce", 20, "ok")]


@needs_hooks
def test_operations_on_the_backend_itself_pass_unseen() -> None:
    """As docs/start/frameworks.md says: torch calls the hooks for a group's operations alone."""
    made, _ = group()
    made._get_backend(torch.device("cpu")).allreduce([torch.ones(3)])
    made.allreduce([torch.ones(5)]).wait()
    assert drain(_C.process_recorder(1), 1)["bytes"].tolist() == [20]


@needs_hooks
def test_a_group_ends_with_its_hooks() -> None:
    made, recording = group()
    del recording
    backend = made._get_backend(torch.device("cpu"))
    made.allreduce([torch.ones(5)]).wait()
    del made
    backend.allreduce([torch.ones(3)])
    drain(_C.process_recorder(1), 1)


def test_only_a_backend_that_reports_its_ends_is_recorded_by_hooks() -> None:
    gloo = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1)
    assert not register.hooks_suffice(gloo)
    assert not register.hooks_suffice(object())


@pytest.mark.parametrize(
    ("chosen", "kind", "needed", "expected"),
    [
        ("all", "nccl2", False, True),
        ("none", "gloo", True, False),
        ("auto", "gloo", False, True),
        ("auto", "nccl2", True, True),
        ("auto", "nccl2", False, False),
        ("auto", "nccl", False, False),
    ],
)
def test_which_groups_may_be_handed_over(
    chosen: str, kind: str, needed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRUX_SWITCH_GROUPS", chosen)
    asked = SimpleNamespace(needs_handover=lambda: needed)
    monkeypatch.setattr(inner_backends, "listener", lambda: asked)
    backend = SimpleNamespace(name=lambda: kind)
    assert inner_backends.may_hand_over(backend) is expected
    monkeypatch.setenv("CRUX_LINKS", "none")
    assert inner_backends.must_wrap(backend) is expected
    monkeypatch.setenv("CRUX_LINKS", "loop")
    assert inner_backends.must_wrap(backend), "torch's hooks can't hold an operation on its stream"


def device(mlx5: bool) -> Any:
    return SimpleNamespace(is_mlx5=mlx5)


@pytest.mark.parametrize(
    ("env", "devices", "seen", "expected"),
    [
        ({}, [True, True], True, True),
        ({}, [True, False], True, False),
        ({}, [], True, False),
        ({}, [True], False, False),
        ({"NCCL_IB_DISABLE": "1"}, [True], True, False),
        ({"NCCL_NET": "Socket"}, [True], True, False),
        ({"NCCL_NET": "IB"}, [True], True, True),
    ],
)
def test_live_queue_pairs_move_on_mlx5_alone(
    env: dict[str, str],
    devices: list[bool],
    seen: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(QueuePairs, "__init__", lambda self: None)
    monkeypatch.setattr(QueuePairs, "are_seen", seen)
    found = tuple(device(mlx5) for mlx5 in devices)
    assert all_can_move(env, lambda: found) is expected


def test_without_the_transport_nothing_moves_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: object) -> None:
        raise CruxError("not built")

    monkeypatch.setattr(QueuePairs, "__init__", missing)
    assert not all_can_move({}, lambda: (device(True),))
