"""Text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def load(limit_bytes: int = 4_000_000) -> torch.Tensor:
    """The library's modules, in the order of their names, as one uint8 tensor."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def sample(
    text: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` random windows of ``length`` bytes, and for each byte the one that follows it."""
    starts = torch.randint(len(text) - length - 1, (rows, 1), generator=generator)
    window = text[starts + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]
