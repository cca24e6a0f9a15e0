"""The part of crux_torch that runs inside torch.distributed; sources in csrc/bindings."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend, ProcessGroup, Store, Work

#: Size of one record; ``crux_torch.measure.records.RECORD`` describes it to numpy.
RECORD_BYTES: int
#: Operation names by their number in a record.
OPS: tuple[str, ...]

class Group:
    """A process group as records refer to it."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> list[int]:
        """Global ranks in group order; empty for the whole world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class Recorder:
    """The lock-free ring that every collective of this process leaves a record in."""

    enabled: bool
    def drain(self, max: int) -> bytes:
        """The oldest records, at most ``max``, as bytes; the GIL is released meanwhile."""

    def groups(self) -> list[Group]: ...
    @property
    def recorded(self) -> int: ...
    @property
    def dropped(self) -> int:
        """Records that found the ring full."""

    @property
    def captured(self) -> int:
        """Operations that went into graphs, unrecorded: they run when these are replayed."""

    @property
    def capacity(self) -> int: ...

def process_recorder(capacity: int) -> Recorder:
    """The one recorder of this process; the first call decides its capacity."""

def tolerate_captures(device: str) -> None:
    """From now on what this thread asks of the current device breaks no other thread's capture."""

class DelegatingBackend(Backend):
    """A c10d backend that hands every operation to an inner one and records it."""

    def __init__(self, name: str, rank: int, size: int, recorder: Recorder) -> None: ...
    def add_inner(self, device: str, inner: Backend) -> None:
        """Operations on tensors of ``device`` go to ``inner``. Before the first operation only."""

    def stand_as_gloo(self, options: Backend.Options) -> bool:
        """Let groups know it as Gloo, with ``options``; false where torch's C++ could not."""

    def publish(self, store: Store, born: int) -> None:
        """Let the inner backends be replaced.

        Args:
            store: that the group was given.
            born: the newest switch that was known before they were made.
        """

    @property
    def handovers(self) -> list[Handover]:
        """What holds the inner backends, one for each that the group was made with."""

    def inner(self, device: str) -> Backend:
        """Raises RuntimeError where no inner backend serves ``device``."""

    @property
    def default_inner(self) -> Backend:
        """The accelerator's inner backend where there is one, else the CPU's."""

    @property
    def group_index(self) -> int:
        """Index of this backend's group in the recorder's table."""

    def __getattr__(self, attribute: str) -> Any:
        """Whatever only the inner backend's class has."""

#: Collectives; peer, tag, whether this rank sends, and count of each key of point-to-point
#: operations; whether these stay where they are.
Counts = tuple[int, list[tuple[int, int, bool, int]], bool]

class Handover:
    """The inner backend of one type of device in a group and, while switching, the next one.

    One thread at a time may switch; csrc/process_group/handover_point.h has the rules.
    """

    @property
    def group(self) -> int:
        """Index of the group in the recorder's table."""

    @property
    def device(self) -> str:
        """The type of device; of several that one backend serves, the first."""

    @property
    def backend(self) -> Backend:
        """The current inner backend; raises RuntimeError once closed."""

    @property
    def store(self) -> Store | None: ...
    @property
    def born(self) -> int:
        """The newest switch that was known when the first inner backend was made."""

    @property
    def refusal(self) -> str:
        """Why no switch can begin; empty where one can."""

    @property
    def closed(self) -> bool:
        """Whether the process group has ended."""

    @property
    def collectives(self) -> int:
        """Collectives issued so far."""

    @property
    def has_transfers(self) -> bool:
        """Whether point-to-point operations were issued."""

    @property
    def armed(self) -> bool:
        """Whether a switch is under way that was not given up."""

    @property
    def stopped(self) -> bool:
        """Whether all below the count was issued, and an operation waits for the next backend."""

    @property
    def waits_on(self) -> int:
        """Index of the device of the operation that waits, or waited last; -1: none has."""

    @property
    def waits(self) -> tuple[int, float]:
        """Operations that waited in the last switch, and the longest wait in seconds."""

    def turn(self) -> AbstractContextManager[Backend]:
        """Holds the place of a collective that is issued past the group.

        Entering gives the inner backend that serves it, and may wait as a collective may.
        """

    def apply(self, setting: Callable[[Backend], object]) -> None:
        """Call it with each inner backend in use; what it raises comes out."""

    def configure(self, name: str, setting: Callable[[Backend], object]) -> None:
        """As ``apply``, and with each that is made later; a later one of a name replaces it."""

    def forget(self, name: str) -> None:
        """Leave what was configured by that name out for those that are made later."""

    def refuse(self, reason: str) -> None:
        """No switch from now on."""

    def arm(self, next: Backend | None, margin: int, limit: timedelta) -> Counts:
        """Begin a switch to ``next``.

        Args:
            next: made by the stock creator; None: ``replace`` will bring it.
            margin: collectives that may be issued before any has to wait.
            limit: that one waits at most; then the switch is given up.

        Returns:
            this rank's hold point.

        Raises:
            RuntimeError: refused, or a switch is under way.
        """

    def decide(self, counts: Counts) -> bool:
        """Let the switch happen at ``counts``; False where this rank has given it up."""

    def cancel(self) -> None:
        """Give the switch up, unless it is decided and has a next backend, which it closes.

        Operations that wait go on.
        """

    def finish(self) -> bool:
        """Make the next backend the current one, once no operation takes the current any more."""

    def replace(self, next: Backend) -> bool:
        """Make ``next`` the current backend of a rank that has ``stopped``, until ``cancel``.

        Operations wait until then. False where this rank has given the switch up.
        """

    def release(self) -> None:
        """Close the backend that is out of use; waits for its operations."""

class HookedGroup:
    """Records what a process group over a stock backend issues. Only in a torch with hooks."""

    @staticmethod
    def suffices(backend: Backend) -> bool:
        """Whether the backend reports the end of its operations."""

    @staticmethod
    def attach(
        group: ProcessGroup, backend: Backend, device: str, alone: bool, recorder: Recorder
    ) -> HookedGroup:
        """Record its operations on ``device``. ``alone``: it has no other backend."""

    def start_block(self) -> None:
        """Coalesced operations follow."""

    def end_block(self) -> None:
        """They are about to be issued."""

    def block_ended(self, work: Work | None) -> None:
        """They were issued."""

    def block_failed(self) -> None:
        """They were refused."""

def handovers() -> list[Handover]:
    """Those of all process groups of this process that were published and have not ended."""

def store_prefix(store: Store) -> str:
    """What a store puts before its keys, a PrefixStore's prefixes together."""

class LinkHolder:
    """One process in the table of a link."""

    @property
    def pid(self) -> int:
        """In its own PID namespace."""

    @property
    def level(self) -> int:
        """-1 where it takes no part in the order."""

    @property
    def operations(self) -> int:
        """In flight on the link, or waiting for it."""

    @property
    def changed_ns(self) -> int:
        """CLOCK_MONOTONIC of the last change of ``operations``."""

    @property
    def same_job(self) -> bool: ...

class LinkGate:
    """The PCIe semaphores of this process (docs/understand/host.md)."""

    def join(self, folder: str, cluster: str, link: str, job: str) -> int:
        """Take a place on a link, whose table is a file in ``folder``.

        Returns:
            the link's index.

        Raises:
            RuntimeError: its file is not this user's alone, has another layout, or is full.
        """

    def retire(self) -> None:
        """Hinder nobody and give way to nobody any more; remove the files that nobody uses."""

    def set_level(self, level: int, priority: float = 0.0) -> None:
        """Whose operations go first: the higher level's, of one level the higher priority's.

        -1: take no part in the order.
        """

    def set_wait_s(self, seconds: float) -> None:
        """How long an operation gives way at most."""

    def cross(self, group: int, links: list[int]) -> None:
        """Operations of a group (its index in the recorder) cross these links from now on.

        Raises:
            ValueError: more groups than it keeps.
            IndexError: no such link.
        """

    def install(self, on: bool) -> None:
        """Let the backend's operations pass here; without it they don't even ask."""

    @property
    def installed(self) -> bool: ...
    def shared(self, link: int) -> bool:
        """Whether another job is on the link."""

    def holders(self, link: int) -> list[LinkHolder]: ...
    @property
    def device_refusal(self) -> str:
        """Why the device can't hold operations, as far as was tried; empty if it can."""

    @property
    def waits(self) -> tuple[int, int, int, int]:
        """Operations that waited, waits that ran out, nanoseconds in all, and of the longest."""

    def enter(self, group: int, bytes: int) -> int:
        """What the backend does before an operation; the ticket is for :meth:`leave`."""

    def leave(self, ticket: int) -> None:
        """What the backend does when it has ended."""

def link_gate() -> LinkGate:
    """The gate of this process."""

def begin_operators(counted: set[str], found: Callable[[], None]) -> None:
    """From now on note which operators this thread runs, and autograd's threads on its behalf.

    Args:
        counted: qualified names of the operators whose arguments are kept.
        found: called before one of them runs outside backward.
    """

def end_operators() -> tuple[
    list[tuple[str, tuple[Any, ...], dict[str, Any], Any, bool, int]],
    list[tuple[tuple[str, str], tuple[str, str]]],
]:
    """Stop, in the thread that began.

    Returns:
        Of each call that was noted: name, arguments, keyword arguments, result, whether the first
        tensor is on a GPU, and how often it ran. Tensors are stand-ins without data. Of each other
        operator: name and overload, and those of the operator that called it.
    """
