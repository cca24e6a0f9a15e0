"""``crux qos check`` of all pairs of leaves: which hosts, and how their commands are started."""

from __future__ import annotations

import contextlib
import itertools
import select
import shlex
import subprocess
from collections.abc import Iterator, Sequence

import msgspec

from crux_torch.errors import CruxError
from crux_torch.network.probe.qos_probe import QosReport
from crux_torch.network.topology import NETWORK_KINDS, Topology

#: Time for a command on a host to start, beside what it does.
START_S = 60.0
_LONGEST_REPLY = 1 << 20


class PairError(CruxError):
    """A pair of hosts could not be checked. Says why."""


def pairs(topology: Topology) -> tuple[tuple[str, str], ...]:
    """Returns one host below each leaf, paired with that of every other leaf, in both directions.

    Raises:
        PairError: fewer than two leaves have a host with an address.
    """
    below: dict[str, str] = {}
    for edge in topology.edges:
        host = topology.host_of(edge.src)
        is_leaf = topology.nodes[edge.dst].kind in NETWORK_KINDS
        # A host with several leaves stands for one of them only.
        if host in below.values() or not is_leaf:
            continue
        if host is not None and topology.addresses_of(host):
            below.setdefault(edge.dst, host)
    if len(below) < 2:
        raise PairError(
            "the topology has no two leaves with hosts that have addresses: add `addresses` "
            "(docs/operate/topology.md)"
        )
    return tuple(itertools.permutations(below.values(), 2))


def check_pair(
    topology: Topology, pair: tuple[str, str], on: str, options: Sequence[str], seconds: float
) -> QosReport:
    """Returns the result for the way from the first host of ``pair`` to the second.

    Args:
        on: command that runs its further arguments on ``{host}``.
        options: of ``crux qos check`` and, those about the port, of ``crux qos listen``.

    Raises:
        PairError: a command failed on one of them.
    """
    source, destination = pair
    port = ["--port", options[options.index("--port") + 1]]
    limit = ["--sessions", "1", "--seconds", f"{seconds + START_S:.0f}"]
    with _started(_remote(on, destination, ["listen", *port, *limit]), destination):
        address = topology.addresses_of(destination)[0]
        command = _remote(on, source, ["check", address, *options, "--json"])
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds + START_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PairError(f"{source}: {error}") from None
    try:
        return msgspec.json.decode(done.stdout[:_LONGEST_REPLY], type=QosReport)
    except msgspec.MsgspecError:
        raise PairError(f"{source}: {_last_line(done.stderr) or 'no result'}") from None


def _remote(on: str, host: str, arguments: Sequence[str]) -> list[str]:
    if host.startswith("-"):
        raise PairError(f"host {host!r}: its name would be an option of {on!r}")
    return [*(word.replace("{host}", host) for word in shlex.split(on)), "crux", "qos", *arguments]


@contextlib.contextmanager
def _started(command: Sequence[str], host: str) -> Iterator[None]:
    """A listener on a host, from when it is ready to the end of the block."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise PairError(f"{host}: {error}") from None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        if not ready or not process.stdout.readline():
            process.kill()
            said = process.stderr.read(4096).decode(errors="replace")
            raise PairError(f"{host}: no listener: {_last_line(said) or 'it says nothing'}")
        yield
    finally:
        process.kill()
        process.communicate()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
