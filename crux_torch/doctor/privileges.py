"""What needs a privilege. Training under Crux needs none."""

from __future__ import annotations

import shutil
from pathlib import Path

from crux_torch.doctor.check import Check, Part

#: Bits of the effective set in /proc/self/status: capabilities(7).
CAP_NET_ADMIN = 12
CAP_NET_RAW = 13
PROC = Path("/proc")


def has_capability(capability: int, proc: Path = PROC) -> bool:
    """Whether this process has ``capability`` in effect; OSError or ValueError if nobody says."""
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    raise ValueError("no CapEff in /proc/self/status")


def live_paths(proc: Path = PROC) -> Check:
    """Whether the path of a live TCP connection can be verified."""
    cost = "paths are probed before connect(), but not verified afterwards"
    part = Part("paths of live TCP", cost)
    try:
        if has_capability(CAP_NET_RAW, proc):
            return part.ok("can be verified (CAP_NET_RAW)")
    except (OSError, ValueError, IndexError) as error:
        return part.missing(f"unknown: {error}", "run crux doctor on Linux")
    remedy = "give the training container CAP_NET_RAW (--cap-add NET_RAW)"
    return part.missing("no CAP_NET_RAW", remedy)


def namespaces(proc: Path = PROC) -> Check:
    """Whether the demo can build its own network."""
    cost = "the demo runs on loopback, which has no congested link, so it shows no gain"
    part = Part("network namespaces", cost)
    try:
        admin = has_capability(CAP_NET_ADMIN, proc)
        spaces = int((proc / "sys/user/max_user_namespaces").read_text())
        clone = proc / "sys/kernel/unprivileged_userns_clone"
        unprivileged = spaces > 0 and (not clone.exists() or clone.read_text().strip() == "1")
    except (OSError, ValueError, IndexError) as error:
        return part.missing(f"unknown: {error}", "run crux doctor on Linux")
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not (admin or unprivileged):
        found = "neither CAP_NET_ADMIN nor unprivileged user namespaces"
        return part.missing(found, "run the demo as root, or sysctl user.max_user_namespaces=15000")
    if tools:
        return part.missing(f"no {' and no '.join(tools)}", "apt-get install iproute2")
    return part.ok(f"through {'CAP_NET_ADMIN' if admin else 'unprivileged user namespaces'}")
