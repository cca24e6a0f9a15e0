"""The part of crux_torch that runs inside torch.distributed; sources in csrc/bindings."""

from typing import Any

from torch._C._distributed_c10d import Backend

#: Size of one record; ``crux_torch.profile.record.RECORD`` describes it to numpy.
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
    def capacity(self) -> int: ...

def process_recorder(capacity: int) -> Recorder:
    """The one recorder of this process; the first call decides its capacity."""

class DelegatingBackend(Backend):
    """A c10d backend that hands every operation to an inner one and records it."""

    def __init__(self, name: str, rank: int, size: int, recorder: Recorder) -> None: ...
    def add_inner(self, device: str, inner: Backend) -> None:
        """Operations on tensors of ``device`` go to ``inner``. Before the first operation only."""

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
