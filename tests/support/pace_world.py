"""True time, hosts whose clocks differ from it, and ends of iterations as the test makes them."""

from __future__ import annotations

from collections.abc import Callable

from control_fakes import MemoryStore

SECOND = 10**9


class World:
    """The one true time, in nanoseconds. It also is the clock of the store's process."""

    def __init__(self) -> None:
        self.now_ns = 77 * SECOND

    def host(self, offset_ns: int) -> Callable[[], int]:
        return lambda: self.now_ns + offset_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)


class Marks:
    """Ends of iterations, as the test makes them."""

    def __init__(self) -> None:
        self.total = 0
        self.listeners: list[Callable[[int], None]] = []

    def add_listener(self, listener: Callable[[int], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def mark(self, at_ns: int) -> None:
        self.total += 1
        for listener in self.listeners:
            listener(at_ns)


class Clocked(MemoryStore):
    """A store whose clock is the world's, behind delays that the test draws."""

    def __init__(self, world: World, delays: Callable[[], tuple[int, int]]) -> None:
        super().__init__()
        self.world, self.delays = world, delays

    def clock_ns(self) -> int:
        there, back = self.delays()
        self.world.now_ns += there
        told = self.world.now_ns
        self.world.now_ns += back
        return told
