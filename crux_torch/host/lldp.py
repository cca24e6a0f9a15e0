"""The switch ports at the other ends of this host's cables, as lldpd heard of them (LLDP)."""

from __future__ import annotations

import re
import shutil
import subprocess

from crux_torch.errors import CruxError
from crux_torch.network.formats.lldp import Neighbour, neighbours

#: Bytes of an answer at most; a neighbour takes a few thousand.
MAX_BYTES = 1 << 20
TIMEOUT_S = 5.0
#: The speed of the neighbour's port is one of the details.
_ARGUMENTS = ("show", "neighbors", "details", "-f", "json")
#: Time and place of a message of lldpcli.
_PREFIX = re.compile(r"^\S+ \[[^\]]*\] ")


def read_neighbours(owner: str) -> tuple[dict[str, Neighbour], str]:
    """Returns the neighbour of each interface of this host, and the reason if there are none.

    Args:
        owner: name of this host.
    """
    program = shutil.which("lldpcli") or shutil.which("lldpcli", path="/usr/sbin:/sbin")
    if program is None:
        return {}, "no lldpcli: install lldpd, and let it run, to learn the speeds of links"
    try:
        done = subprocess.run(
            [program, *_ARGUMENTS],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"lldpcli: {error}"
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        said = _PREFIX.sub("", said)
        return {}, f"lldpcli: {said or f'exit code {done.returncode}'}"
    if len(done.stdout) > MAX_BYTES:
        return {}, f"lldpcli: an answer of over {MAX_BYTES} bytes"
    try:
        found = of_interfaces(owner, done.stdout.decode(errors="replace"))
    except CruxError as error:
        return {}, str(error)
    return found, "" if found else "lldpd has heard of no neighbour: do the switches send LLDP?"


def of_interfaces(owner: str, answer: str) -> dict[str, Neighbour]:
    """Returns the neighbour of each interface in an answer of ``lldpcli``.

    An interface that heard of several, through a bridge that passes LLDP on, has none.

    Raises:
        TopologyError: it is no such answer.
    """
    found: dict[str, list[Neighbour]] = {}
    for neighbour in neighbours(owner, "lldpcli", answer):
        found.setdefault(neighbour.port, []).append(neighbour)
    return {port: each[0] for port, each in found.items() if len(each) == 1}
