"""A trained network in a file: its weights, its hosts, and the samples that it learned from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, DispatchError
from crux_torch.dispatch.predictor import Network, Samples
from crux_torch.dispatch.table import HostTable
from crux_torch.files import read_file, write_file

_VERSION = 1
MAX_FILE_BYTES = 1 << 30
#: Two measurements of one choice that differ by less than this share say the same.
EQUAL = 0.05


def save_network(file: Path, network: Network, hosts: Sequence[str]) -> None:
    """Write a trained ``network`` of ``hosts``, whole or not at all."""
    import torch

    assert network.memory is not None
    content = {
        "version": _VERSION,
        "hosts": list(hosts),
        "weights": network.module.state_dict(),
        "choices": torch.from_numpy(network.memory.choices).int(),
        "bandwidth_Bps": torch.from_numpy(network.memory.bandwidth_Bps),
    }
    packed = io.BytesIO()
    torch.save(content, packed)
    write_file(file, packed.getvalue())


def load_network(file: Path, tables: Sequence[HostTable]) -> tuple[Network, DispatchCluster]:
    """The network in ``file``, and the cluster of ``tables`` in an order that it knows them by.

    Hosts that it does not know come last. The uplinks of the cluster are not known.

    Raises:
        DispatchError: the file is no network's, or a host that it knows has no table.
    """
    import torch

    network = Network()
    try:
        content = torch.load(io.BytesIO(read_file(file, MAX_FILE_BYTES)), weights_only=True)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, not {_VERSION}")
        hosts = [str(host) for host in content["hosts"]]
        network.module.load_state_dict(content["weights"])
        choices = content["choices"].numpy().astype(np.int64).reshape(-1, len(hosts))
        memory = Samples(choices, content["bandwidth_Bps"].double().numpy())
    except Exception as error:  # whatever the bytes lead torch to
        raise DispatchError(f"{file} has no network of `crux dispatch learn`: {error}") from None
    network.module.eval()
    by_name = {table.host: table for table in tables}
    if lacking := [host for host in hosts if host not in by_name]:
        raise DispatchError(
            f"{file} has learned of {lacking[0]!r}, which has no --table: give it, or remove the "
            "file and learn again"
        )
    known = [by_name.pop(host) for host in hosts]
    cluster = DispatchCluster([*known, *by_name.values()], np.zeros(len(tables)))
    network.memory = Samples(
        np.pad(memory.choices, ((0, 0), (0, len(by_name)))), memory.bandwidth_Bps
    )
    return network, cluster


def news(network: Network, samples: Samples) -> Samples:
    """What of ``samples`` the network does not remember."""
    memory = network.memory
    if memory is None:
        return samples
    known = {
        choice.tobytes(): rate
        for choice, rate in zip(memory.choices, memory.bandwidth_Bps.tolist(), strict=True)
    }
    rows = [
        i
        for i, (choice, rate) in enumerate(
            zip(samples.choices, samples.bandwidth_Bps.tolist(), strict=True)
        )
        if abs(known.get(choice.tobytes(), 0.0) / rate - 1) > EQUAL
    ]
    return samples.part(np.array(rows, np.int64))
