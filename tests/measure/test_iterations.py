"""Iteration marks: one an iteration, whatever optimizers there are."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from crux_torch.measure import iterations  # noqa: E402
from crux_torch.measure.iterations import IterationMarks  # noqa: E402


@pytest.fixture
def marks() -> Iterator[IterationMarks]:
    marks = IterationMarks(capacity=100)
    marks.install()
    yield marks
    marks.remove()


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def test_one_mark_a_step(marks: IterationMarks) -> None:
    sgd = optimizer()
    before = time.monotonic_ns()
    for _ in range(3):
        sgd.step()
    found = marks.marks_ns()
    assert len(found) == 3
    assert (found[1:] >= found[:-1]).all()
    assert before <= found[0] <= found[-1] <= time.monotonic_ns()
    assert len(marks.marks_ns(since_ns=int(found[1]))) == 2


def test_only_the_first_optimizer_counts(marks: IterationMarks) -> None:
    generator, critic = optimizer(), optimizer()
    for _ in range(4):
        generator.step()
        for _ in range(5):
            critic.step()
    assert marks.count == 4


def test_an_optimizer_inside_another_is_not_elected(marks: IterationMarks) -> None:
    inner = optimizer()

    class Outer(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            inner.step()
            inner.step()
            return super().step(closure)

    weight = torch.nn.Parameter(torch.zeros(2))
    outer = Outer([weight], lr=0.1)
    for _ in range(3):
        outer.step()
    assert marks.count == 3


def test_another_is_elected_when_the_first_is_gone_or_silent(marks: IterationMarks) -> None:
    first, second = optimizer(), optimizer()
    first.step()
    for _ in range(iterations.SILENT_STEPS + 3):
        second.step()
    assert marks.count == 3
    third = optimizer()
    del second
    gc.collect()
    third.step()
    assert marks.count == 1


def test_capacity_and_removal(marks: IterationMarks) -> None:
    sgd = optimizer()
    for _ in range(120):
        sgd.step()
    assert marks.count == 100
    marks.remove()
    sgd.step()
    assert marks.count == 100
    assert len(marks.marks_ns()) == 100


def test_a_listener_that_fails_does_not_stop_the_step(
    marks: IterationMarks, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(mark_ns: int) -> None:
        raise RuntimeError("listener")

    remove = marks.add_listener(fail)
    sgd = optimizer()
    sgd.step()
    sgd.step()
    assert marks.count == 2
    assert len(caplog.records) == 1
    remove()
    remove()


def test_a_compiled_step_still_compiles(marks: IterationMarks) -> None:
    torch._dynamo.reset()
    sgd = optimizer()
    step = torch.compile(sgd.step, backend="eager")
    step()
    step()
