"""Descriptors that this process has open."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """The numbers of the open descriptors, once garbage of earlier tests has closed its own."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
