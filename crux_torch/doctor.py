"""What ``crux doctor`` looks at: each part that Crux uses, and what its absence costs.

Every finding comes from trying the thing, not from a version number, and takes a second at most.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from crux_torch.errors import SettingsError
from crux_torch.settings import Settings
from cruxrun.autoload import obstacle

OLDEST_TORCH = (2, 11)
CONNECT_TIMEOUT_S = 1.0
CAP_NET_ADMIN = 12


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        part: what was looked at.
        state: ``ok``; ``missing``: Crux works without it, at a cost; ``broken``: it has to be
            repaired before Crux can work.
        finding: what was found.
        cost: what its absence costs; empty where it is there.
        remedy: how to get it; empty where it is there.
    """

    part: str
    state: Literal["ok", "missing", "broken"]
    finding: str
    cost: str = ""
    remedy: str = ""


def examine(env: Mapping[str, str]) -> list[Check]:
    """Every check, in the order in which things depend on each other.

    Args:
        env: the environment that a job would be started in.
    """
    try:
        settings = Settings.from_env(env)
    except SettingsError as error:
        settings = Settings()
        checks = [Check("settings", "broken", str(error), "cruxrun refuses it", "correct it")]
    else:
        checks = [Check("settings", "ok", "every CRUX_* variable can be used")]
    probes: tuple[Callable[[], Iterator[Check]], ...] = (
        torch_release,
        extension,
        backends,
        lambda: autoload(env),
        lambda: classes(settings),
        lambda: store(settings),
        lambda: topology(settings),
        privileges,
    )
    for probe in probes:
        checks.extend(probe())
    return checks


def torch_release() -> Iterator[Check]:
    """Whether torch imports and is recent enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    remedy = f"pip install 'torch>={oldest}'"
    try:
        import torch
    except Exception as error:
        yield Check("torch", "broken", f"does not import: {error}", "nothing works", remedy)
        return
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        found = f"{torch.__version__}, older than {oldest}"
        yield Check("torch", "broken", found, "the backend can't be used", remedy)
    else:
        yield Check("torch", "ok", torch.__version__)


def extension() -> Iterator[Check]:
    """Whether the C++ extension is there and was built for this torch."""
    cost = "jobs train on the stock backends, unmeasured"
    try:
        import_module("crux_torch._C")
    except ModuleNotFoundError as error:
        yield Check("extension", "missing", str(error), cost, "build it: pip install .")
    except Exception as error:
        remedy = "build it again for this torch: pip install --force-reinstall --no-deps ."
        yield Check("extension", "broken", f"does not load: {error}", cost, remedy)
    else:
        yield Check("extension", "ok", "crux_torch._C loads")


def backends() -> Iterator[Check]:
    """Which stock backends there are to delegate to."""
    try:
        import torch
        import torch.distributed as dist
    except Exception:
        return
    if dist.is_available() and dist.is_gloo_available():
        yield Check("gloo", "ok", "CPU tensors go through Gloo")
    else:
        remedy = "a build of torch with USE_GLOO"
        yield Check("gloo", "missing", "not in this torch", "no collectives on the CPU", remedy)
    cost = "no collectives on CUDA tensors"
    if not (dist.is_available() and dist.is_nccl_available()):
        yield Check("nccl", "missing", "not in this torch", cost, "a CUDA build of torch")
    elif not torch.cuda.is_available():
        found = "in this torch, but no GPU can be used"
        yield Check("nccl", "missing", found, cost, "a machine with NVIDIA GPUs and their driver")
    else:
        yield Check("nccl", "ok", f"{torch.cuda.device_count()} GPUs")


def autoload(env: Mapping[str, str]) -> Iterator[Check]:
    """Whether ``import torch`` in a worker attaches Crux."""
    found = obstacle(env)
    if found:
        cost = "cruxrun launches scripts, but they run on the stock backends"
        remedy = "install the package, unset the variable, or call crux_torch.attach()"
        yield Check("autoload", "missing", found, cost, remedy)
    else:
        yield Check("autoload", "ok", "import torch attaches Crux under cruxrun")


def classes(settings: Settings) -> Iterator[Check]:
    """Whether this process may mark its packets with every DSCP of the map."""
    families = (
        ("IPv4", socket.AF_INET, socket.IPPROTO_IP, socket.IP_TOS),
        ("IPv6", socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    )
    for name, family, protocol, option in families:
        part = f"DSCP on {name}"
        cost = f"priorities have no effect on {name} connections"
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                for dscp in settings.dscp_map:
                    probe.setsockopt(protocol, option, dscp << 2)
                    if probe.getsockopt(protocol, option) >> 2 != dscp:
                        raise OSError(f"DSCP {dscp} does not stay set")
        except OSError as error:
            remedy = f"allow {name} and setsockopt in this container"
            yield Check(part, "missing", str(error), cost, remedy)
        else:
            marks = ", ".join(map(str, settings.dscp_map))
            yield Check(part, "ok", f"can be set to {marks}")


def store(settings: Settings) -> Iterator[Check]:
    """Whether somebody listens where the cluster's store should be."""
    if settings.store == "none":
        cost = "every job runs alone, without a plan"
        yield Check("store", "missing", "switched off: CRUX_STORE=none", cost, "set CRUX_STORE")
        return
    url = urlsplit(settings.store)
    try:
        socket.create_connection((url.hostname or "", url.port or 0), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        yield Check(
            "store",
            "missing",
            f"{settings.store}: {error}",
            "jobs here agree with nobody until it can be reached",
            "the first cruxrun on its host starts it; from other hosts, open the port",
        )
    else:
        yield Check("store", "ok", f"{settings.store} answers")


def topology(settings: Settings) -> Iterator[Check]:
    """Whether the network is described."""
    if not settings.topology:
        cost = "every host is taken to share one core link, and no path is chosen"
        yield Check("topology", "missing", "none given", cost, "write one, set CRUX_TOPOLOGY")
    elif not os.access(settings.topology, os.R_OK):
        found = f"{settings.topology} can't be read"
        yield Check("topology", "broken", found, "cruxrun refuses it", "correct CRUX_TOPOLOGY")
    else:
        yield Check("topology", "ok", settings.topology)


def privileges(proc: Path = Path("/proc")) -> Iterator[Check]:
    """What only the demo's own network needs: training under Crux needs no privilege."""
    cost = "the demo runs on loopback without a congested link, where no gain can show"
    try:
        status = (proc / "self/status").read_text()
        effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
        admin = bool(int(effective.split()[1], 16) >> CAP_NET_ADMIN & 1)
        spaces = int((proc / "sys/user/max_user_namespaces").read_text())
        clone = proc / "sys/kernel/unprivileged_userns_clone"
        unprivileged = spaces > 0 and (not clone.exists() or clone.read_text().strip() == "1")
    except (OSError, ValueError, StopIteration) as error:
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
