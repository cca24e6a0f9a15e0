"""Choices measured across hosts, as lines ``HOST:DEVICE,DEVICE HOST:DEVICE;GB/s`` of a file."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, DispatchError
from crux_torch.dispatch.predictor import Samples
from crux_torch.dispatch.table import TableError, read_lines


def read_samples(file: Path, cluster: DispatchCluster) -> Samples:
    """The samples in ``file``; # begins a comment.

    Raises:
        DispatchError: with the number of the line that is wrong.
        TableError: the file can't be read.
    """
    choices, rates = [], []
    try:
        for number, row in enumerate(csv.reader(read_lines(file), delimiter=";"), 1):
            if not row or row[0].lstrip().startswith("#"):
                continue
            where = f"{file}:{number}"
            try:
                devices, rate = row
                choice = cluster.choice(dict(_named(part) for part in devices.split()))
                rates.append(float(rate) * 1e9)
            except ValueError as error:
                raise DispatchError(
                    f"{where}: expected `HOST:DEVICE,... HOST:DEVICE,...;GB/s`: {error}"
                ) from None
            if np.count_nonzero(choice) < 2 or not 0 < rates[-1] < 1e15:
                raise DispatchError(f"{where}: expected a rate, and devices of several hosts")
            choices.append(choice)
    except csv.Error as error:
        raise TableError(f"{file}: {error}") from None
    return Samples(np.array(choices).reshape(-1, len(cluster.tables)), np.array(rates))


def sample_line(devices: dict[str, list[str]], rate_Bps: float) -> str:
    """One line of such a file."""
    told = " ".join(f"{host}:{','.join(names)}" for host, names in devices.items())
    return f"{told};{rate_Bps / 1e9:.6g}\n"


def _named(text: str) -> tuple[str, list[str]]:
    host, colon, devices = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} names no devices")
    return host, devices.split(",")
