"""What a part gave on one rank, in a form that two processes can compare bit by bit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

VALUE, ERROR, DIED = "value", "error", "died"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A value, the message of an error, or what a process said that died of it."""

    kind: str
    value: Any
    seconds: float = 0.0

    def same_as(self, other: Outcome) -> bool:
        return (self.kind, self.value) == (other.kind, other.value)


def plain(value: Any) -> Any:
    """``value`` with tensors as their type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), raw.hex()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return value


def message(error: BaseException) -> str:
    """What the user reads first, less addresses, numbers and times, which differ between runs."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+|[0-9.]+', '#', lines[0])}"


def to_json(outcome: Outcome) -> bytes:
    return msgspec.json.encode(outcome)


def from_json(raw: bytes) -> Outcome:
    return msgspec.json.decode(raw, type=Outcome)
