"""Faults that meet a switch of communicators on the rig."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from cuda_rig import control

from rig.kind import is_legacy
from rig.part import Rank

#: Seconds that operations wait for a switch, a quarter of it for a communicator.
PATIENCE_S = 24.0
#: When a communicator that hangs has been aborted, on a busy machine, too.
LATE_S = 3 * PATIENCE_S
#: Of the device's memory that is left where a communicator finds none.
LEFT_BYTES = 48 << 20
#: What NCCL takes for a communicator on the rig.
COMMUNICATOR_BYTES = "CUDA_RIG_COMMUNICATOR_BYTES"

#: Faults with which the group has to keep its communicator.
HANGS = "init hangs"
KEEPS = (HANGS, "init fails", "init is refused", "little memory is left", "NCCL gets no memory")
#: Faults with which it has to switch all the same.
SWITCHES = ("init is slow", "a capture is under way", "a free waits", "operations are slow")

#: The moments of a switch in which a rank can die: when it is about to say something in a round of
#: docs/understand/handover.md, to make its communicator, or to come to a state.
PHASES = ("start", "hold", "decided", "stopped", "making", "made", "closing")


class Faults:
    """One fault for every other switch, each on one rank; the same on all ranks for one seed."""

    def __init__(self, rank: Rank, seed: int) -> None:
        from crux_torch.backend.handover import GROUPS

        GROUPS.patience_s = PATIENCE_S
        self._rank, self._seed = rank, seed
        self._kind, self._mine = "", False
        self._ballast: torch.Tensor | None = None
        self._stream = torch.cuda.Stream()
        # What the training thread does in each step.
        self._at_step: Callable[[], None] | None = None
        #: Of each switch: the fault, whether all groups switched, their errors, seconds, the
        #: longest wait of an operation in ms, and after what time communicators were given up.
        self.met: list[dict[str, Any]] = []

    def begin(self, generation: int) -> None:
        """Before the switch is asked for."""
        chance = random.Random(f"{self._seed}/{generation // 2}")
        self._kind = ""
        if generation % 2:
            # One round of all kinds before the first comes twice.
            kinds, turn = [*KEEPS, *SWITCHES], generation // 2
            random.Random(f"{self._seed}/{turn // len(kinds)}").shuffle(kinds)
            self._kind = kinds[turn % len(kinds)]
        self._mine = chance.randrange(self._rank.size) == self._rank.rank
        if self._mine and self._kind:
            self._inject(chance)
        control.clear()
        self._began_s = time.monotonic()

    def _inject(self, chance: random.Random) -> None:
        if self._kind == HANGS:
            control.inject("hold", "init")
        elif self._kind == "init fails":
            control.inject("error", "init")
        elif self._kind == "init is refused":
            control.inject("refuse", "init")
        elif self._kind == "init is slow":
            control.inject("delay", "init", chance.uniform(0.05, 0.5))
        elif self._kind == "operations are slow":
            control.inject("delay", "all_reduce", chance.uniform(0.01, 0.1), count=20)
        elif self._kind == "a capture is under way":
            self._at_step = self._capture
        elif self._kind == "a free waits":
            self._at_step = self._free
        elif self._kind == "NCCL gets no memory":
            os.environ[COMMUNICATOR_BYTES] = str(1 << 40)
        else:
            free, _ = torch.cuda.mem_get_info()
            self._ballast = torch.empty(free - LEFT_BYTES, dtype=torch.uint8, device="cuda")

    def end(self, generation: int, statuses: list[Any]) -> None:
        """When nothing of the switch is left on this rank."""
        seconds = time.monotonic() - self._began_s
        self._at_step = None
        # The thread that gives it up may run later than the one that tells of it.
        waits = self._kind == HANGS and not is_legacy()
        late_s = self._began_s + (LATE_S if waits else 0.0)
        while not given_up_s() and time.monotonic() < late_s:
            time.sleep(0.01)
        if self._mine:
            control.release()
            os.environ.pop(COMMUNICATOR_BYTES, None)
            if self._ballast is not None:
                self._ballast = None
                torch.cuda.empty_cache()
        self.met.append(
            {
                "fault": self._kind,
                "switched": all(s.generation == generation and s.state == "idle" for s in statuses),
                "error": "; ".join(s.error for s in statuses if s.error),
                "seconds": seconds,
                "held_ms": max(s.held_ms for s in statuses),
                "given_up_s": given_up_s(),
            }
        )

    def step(self) -> None:
        """On the training thread, after each step."""
        if (at_step := self._at_step) is not None:
            at_step()

    def _capture(self) -> None:
        """In the strictest mode: whatever thread asks CUDA for something unsafe breaks it."""
        counted, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="global")
            counted += 1
            time.sleep(0.02)
            graph.capture_end()
            graph.replay()
            graph.replay()
        self._stream.synchronize()
        assert counted.tolist() == [2.0] * 4

    def _free(self) -> None:
        """Frees memory, as the allocator does where it finds none, while a kernel runs."""
        given = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        self._rank.kind.sleep(0.01)
        del given
        torch.cuda.empty_cache()


def given_up_s() -> list[float]:
    """Seconds between a communicator's init and its abort, of those that were made and aborted."""
    began_ns: dict[int, int] = {}
    found = []
    for each in control.issued():
        if each["op"] == "init":
            began_ns[each["communicator"]] = each["issue_ns"]
        elif each["op"] == "abort" and each["communicator"] in began_ns:
            found.append((each["issue_ns"] - began_ns[each["communicator"]]) / 1e9)
    return found


def die_in(phase: str) -> None:
    """From now on this process dies when a switch gets there; ``phase`` is one of PHASES."""
    from crux_torch.backend import inner_backends
    from crux_torch.backend.handover import attempt, rounds

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    if phase == "making":
        inner_backends.make_next = lambda *_: die()
    elif phase in attempt.UNDER_WAY:
        note = attempt.Member.note

        def dies_in_state(member: Any, **changes: Any) -> None:
            if changes.get("state") == phase:
                die()
            note(member, **changes)

        attempt.Member.note = dies_in_state  # type: ignore[method-assign]
    else:
        round_ = rounds.Agreement.round

        def dies_in_round(agreement: Any, name: str, *args: Any, **options: Any) -> Any:
            if name == phase:
                die()
            return round_(agreement, name, *args, **options)

        rounds.Agreement.round = dies_in_round  # type: ignore[method-assign]
