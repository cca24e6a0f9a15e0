"""What only a privilege gives: training under Crux needs none of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from crux_torch.doctor.check import Check

#: Bits of the effective set in /proc/self/status: capabilities(7).
CAP_NET_ADMIN = 12
CAP_NET_RAW = 13
PROC = Path("/proc")


def has_capability(capability: int, proc: Path = PROC) -> bool:
    """Whether this process has ``capability`` in effect.

    Raises:
        OSError, ValueError: where the kernel doesn't say.
    """
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    raise ValueError("no CapEff in /proc/self/status")


def live_paths(proc: Path = PROC) -> Iterator[Check]:
    """Whether the path of a live TCP connection can be asked for with its own addresses."""
    part = "paths of live TCP"
    cost = "a connection's path is known from probes before connect(), not checked afterwards"
    try:
        raw = has_capability(CAP_NET_RAW, proc)
    except (OSError, ValueError, IndexError) as error:
        yield Check(part, "missing", f"unknown: {error}", cost, "run it on Linux")
        return
    if raw:
        yield Check(part, "ok", "CAP_NET_RAW: traced by segments outside the window")
    else:
        remedy = "give the training container CAP_NET_RAW (--cap-add NET_RAW)"
        yield Check(part, "missing", "no CAP_NET_RAW", cost, remedy)


def namespaces(proc: Path = PROC) -> Iterator[Check]:
    """What only the demo's own network needs."""
    cost = "the demo runs on loopback without a congested link, where no gain can show"
    try:
        admin = has_capability(CAP_NET_ADMIN, proc)
        spaces = int((proc / "sys/user/max_user_namespaces").read_text())
        clone = proc / "sys/kernel/unprivileged_userns_clone"
        unprivileged = spaces > 0 and (not clone.exists() or clone.read_text().strip() == "1")
    except (OSError, ValueError, IndexError) as error:
        yield Check("network namespaces", "missing", f"unknown: {error}", cost, "run it on Linux")
        return
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not (admin or unprivileged):
        found = "neither CAP_NET_ADMIN nor unprivileged user namespaces"
        remedy = "run the demo as root, or sysctl user.max_user_namespaces=15000"
        yield Check("network namespaces", "missing", found, cost, remedy)
    elif tools:
        found = f"no {' and no '.join(tools)}"
        yield Check("network namespaces", "missing", found, cost, "apt-get install iproute2")
    else:
        found = "CAP_NET_ADMIN" if admin else "unprivileged user namespaces"
        yield Check("network namespaces", "ok", f"through {found}")
