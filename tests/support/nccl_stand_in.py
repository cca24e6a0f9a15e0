"""NCCL's backend as far as a switch makes one like it, without a device."""

from __future__ import annotations

from typing import Any


class ProcessGroupNCCL:
    """Of the kind that makes its communicator at its first use."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options, self._rank, self._size = options, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"
