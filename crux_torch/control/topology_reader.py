"""The cluster's topology, parsed once, wherever its bytes come from."""

from __future__ import annotations

import logging
from pathlib import Path

from crux_torch.fabric.loaders import MAX_FILE_BYTES, dump_yaml, load_csv, parse_yaml
from crux_torch.fabric.topology import Topology
from crux_torch.files import read_file
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)


class TopologyReader:
    """Reads this job's file and the shared store's topology, which usually have the same bytes."""

    def __init__(self) -> None:
        self._last: tuple[bytes | None, Topology | None] = (None, None)
        self._warn = WarnOnce(_log)

    def load(self, path: Path) -> tuple[Topology, bytes]:
        """The topology in a file, and its bytes for the shared store, which are always YAML.

        Raises:
            OSError: the file can't be read.
            ValueError: it is no topology (:class:`~crux_torch.fabric.topology.TopologyError`).
        """
        if path.suffix.lower() == ".csv":
            topology = load_csv(path)
            raw = dump_yaml(topology).encode()
        else:
            raw = read_file(path, MAX_FILE_BYTES)
            topology = parse_yaml(raw.decode(), str(path))
        self._last = raw, topology
        return topology, raw

    def read(self, raw: bytes | None) -> Topology | None:
        """The topology in ``raw``; None without any, and if it can't be read, with one warning.

        All leaders read the same bytes, so all of them plan alike.
        """
        if raw is None:
            return None
        if raw != self._last[0]:
            topology = None
            try:
                topology = parse_yaml(raw.decode())
            except (ValueError, RecursionError) as error:
                self._warn("topology", f"planning without the cluster's topology: {error}")
            self._last = raw, topology
        return self._last[1]
