"""This process: its installation, privileges, sockets, the transport library, and the store.

Training under Crux needs no privilege.
"""

from __future__ import annotations

import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from crux_torch.apply import preload as preloading
from crux_torch.apply import transport
from crux_torch.apply.transport import Transport, TransportError
from crux_torch.cli.doctor.finding import Check, Part
from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.settings import PortRange, Settings
from crux_torch.store import PLAN, cluster_prefix
from crux_torch.store.endpoint import LOAD_S, looked_into, open_store, sharing

OLDEST_TORCH = (2, 11)
#: Bits of the effective set in /proc/self/status: capabilities(7).
CAP_NET_ADMIN = 12
CAP_NET_RAW = 13
PROC = Path("/proc")
#: From asm-generic/socket.h and linux/in.h, which the socket module does not name.
SO_MAX_PACING_RATE = 47
IP_RECVERR = 11
RATE_Bps = 10_000_000
ANSWER_WAIT_S = 0.5
#: Ports of the range that are tried before it counts as taken.
PORTS_TRIED = 64
IPV4_SYSCTL = Path("/proc/sys/net/ipv4")
START_TIMEOUT_S = 10.0
#: Asks the library whether it intercepts socket calls; without torch, so it is quick.
_ASK = (
    "import ctypes; library = ctypes.CDLL(None); "
    "print(hasattr(library, 'crux_transport_abi') and library.crux_transport_sees_sockets())"
)
#: Seconds that an exchange with the store may take.
STORE_TIMEOUT_S = 2.0
#: Causes that may be over by the time that a job runs. Others have to be repaired.
_PASSING = frozenset(
    {Cause.ABSENT, Cause.UNREACHABLE, Cause.SILENT, Cause.CUT, Cause.BUSY, Cause.ETCD_AWAY}
)


def torch_release() -> Check:
    """Checks that torch imports and is recent enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    remedy = f"pip install 'torch>={oldest}'"
    try:
        import torch
    except Exception as error:
        return Part("torch", "jobs do not start").broken(f"does not import: {error}", remedy)
    part = Part("torch", "the crux backend does not load")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        return part.broken(f"{torch.__version__}, older than {oldest}", remedy)
    return part.ok(torch.__version__)


def extension() -> Check:
    """Checks that the C++ extension is built for this torch."""
    part = Part("extension", "jobs use the stock backends; Crux measures and steers nothing")
    try:
        import_module("crux_torch._C")
    except ModuleNotFoundError as error:
        return part.missing(str(error), "see docs/start/install.md")
    except Exception as error:
        remedy = "build it for this torch: pip install --no-build-isolation --no-deps ."
        return part.broken(f"does not load: {error}", remedy)
    return part.ok("crux_torch._C loads")


def backends() -> Iterator[Check]:
    """Checks the stock backends of this torch."""
    try:
        import torch
        import torch.distributed as dist
    except Exception:
        return
    part = Part("gloo", "no collectives on CPU tensors")
    if dist.is_available() and dist.is_gloo_available():
        yield part.ok("available for CPU tensors")
    else:
        yield part.missing("not in this torch", "install a torch that is built with USE_GLOO")
    part = Part("nccl", "no collectives on CUDA tensors")
    if not (dist.is_available() and dist.is_nccl_available()):
        yield part.missing("not in this torch", "install a CUDA build of torch")
    elif not torch.cuda.is_available():
        remedy = "nothing if there is no GPU; else install the NVIDIA driver"
        yield part.missing("this torch has NCCL, but no GPU is usable", remedy)
    else:
        yield part.ok(f"{torch.cuda.device_count()} GPUs")


def autoload(env: Mapping[str, str]) -> Check:
    """Checks that ``import torch`` in a worker of cruxrun attaches Crux."""
    part = Part("autoload", "scripts under cruxrun use the stock backends")
    found = preloading.autoload_obstacle(env)
    if found:
        remedy = "install the package, unset the variable, or call crux_torch.attach()"
        return part.missing(found, remedy)
    return part.ok("under cruxrun, `import torch` attaches Crux")


def has_capability(capability: int, proc: Path = PROC) -> bool:
    """Returns True if this process has ``capability`` in effect; raises OSError or ValueError."""
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    raise ValueError("no CapEff in /proc/self/status")


def live_paths(proc: Path = PROC) -> Check:
    """Checks that the path of a live TCP connection can be verified."""
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
    """Checks that the demo can build its own network."""
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


def classes(settings: Settings) -> Iterator[Check]:
    """Checks that this process may set every DSCP of ``CRUX_DSCP_MAP``, if there is one."""
    if not settings.dscp_map:
        return
    families = (
        ("IPv4", socket.AF_INET, socket.IPPROTO_IP, socket.IP_TOS),
        ("IPv6", socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    )
    for name, family, protocol, option in families:
        part = Part(f"DSCP on {name}", f"priorities have no effect on {name} connections")
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                for dscp in settings.dscp_map:
                    probe.setsockopt(protocol, option, dscp << 2)
                    if probe.getsockopt(protocol, option) >> 2 != dscp:
                        raise OSError(f"the kernel ignores DSCP {dscp}")
        except OSError as error:
            yield part.missing(str(error), f"allow {name} and setsockopt() in this container")
        else:
            yield part.ok(f"can be set to {', '.join(map(str, settings.dscp_map))}")


def source_ports(settings: Settings, sysctl: Path = IPV4_SYSCTL) -> Check:
    """Checks that source ports of ``CRUX_PORTS`` can be bound, and are not ephemeral ones."""
    name, ports = "source ports", settings.ports
    if not settings.paths:
        part = Part(name, "connections do not follow the plan's paths")
        return part.missing("switched off: CRUX_PATHS=0", "unset CRUX_PATHS")
    part = Part(name, "TCP connections take the path that ECMP gives them")
    error = ""
    for port in range(ports.first, min(ports.last + 1, ports.first + PORTS_TRIED)):
        try:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError as refusal:
            error = str(refusal)
        else:
            break
    else:
        remedy = "set CRUX_PORTS to a range that is free"
        return part.missing(f"{ports}: none can be bound: {error}", remedy)
    shared = _overlap(ports, sysctl / "ip_local_port_range")
    if not shared:
        return part.ok(f"{ports} can be bound")
    part = Part(name, "fewer ports are free, so a port for a path is found later or not at all")
    return part.missing(
        f"{ports} can be bound, but the kernel also assigns {shared} to other sockets",
        f"change CRUX_PORTS, or sysctl net.ipv4.ip_local_reserved_ports={ports}",
    )


def _overlap(ports: PortRange, file: Path) -> PortRange | None:
    """The part of ``ports`` from which the kernel assigns ephemeral ports."""
    try:
        first, last = map(int, file.read_text().split())
        reserved = file.with_name("ip_local_reserved_ports").read_text()
    except (OSError, ValueError):
        return None
    if str(ports) in reserved.strip().split(","):
        return None
    first, last = max(first, ports.first), min(last, ports.last)
    return PortRange(first, last) if first <= last else None


def pacing() -> Check:
    """Checks that the rate of a connection can be limited."""
    part = Part("SO_MAX_PACING_RATE", "the rates of connections can't be limited")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE_Bps)
            if probe.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) != RATE_Bps:
                raise OSError("the kernel ignores the rate")
    except OSError as error:
        return part.missing(str(error), "use a real Linux kernel, 3.13 or newer (not gVisor)")
    return part.ok("the rates of live connections can be limited")


def probing() -> Check:
    """Checks that a socket's error queue reports an ICMP error, tried on loopback."""
    cost = "paths can't be probed, so connections do not follow the plan's paths"
    part = Part("error queue", cost)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
            probe.connect(("127.0.0.1", _closed_port()))
            probe.send(b"")
            poll = select.poll()
            poll.register(probe, 0)
            if not poll.poll(ANSWER_WAIT_S * 1000):
                raise OSError("no ICMP error came back over loopback")
            _, _, flags, _ = probe.recvmsg(1, 512, socket.MSG_ERRQUEUE)
            if not flags & socket.MSG_ERRQUEUE:
                raise OSError("the error queue is empty")
    except OSError as error:
        remedy = "allow setsockopt(IP_RECVERR) and ICMP in this container (seccomp, firewall)"
        return part.missing(str(error), remedy)
    return part.ok("sockets receive the answers of routers (IP_RECVERR)")


def _closed_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def library() -> Check:
    """Checks that the transport library exists, loads, and has this package's version."""
    cost = "no connection follows the plan: no priorities, rates or paths"
    part = Part("transport library", cost)
    try:
        Transport.load()
    except TransportError as error:
        finding = part.broken if transport.LIBRARY.exists() else part.missing
        return finding(str(error), "build it: pip install --no-build-isolation .")
    return part.ok("loads")


def preload(env: Mapping[str, str], settings: Settings) -> Check:
    """Checks that LD_PRELOAD puts the library into a process."""
    cost = "no paths, and no settings of queue pairs; priorities of sockets still work"
    part = Part("transport preload", cost)
    if not settings.transport:
        return part.missing("switched off: CRUX_TRANSPORT=0", "unset CRUX_TRANSPORT")
    found = preloading.obstacle()
    if found:
        return part.missing(found, "install Crux in a folder that the loader can read")
    started = {**env, **preloading.environment(settings, env)}
    remedy = f"make {transport.LIBRARY} loadable: glibc, no noexec mount, no setuid program"
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-c", _ASK],
            env=started,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return part.missing(str(error), remedy)
    if asked.returncode == 0 and asked.stdout.strip() == "1":
        return part.ok("processes under cruxrun load the library first")
    said = asked.stderr.strip().splitlines()[-1:] or ["the process does not use the library"]
    return part.missing(said[0], remedy)


def store(settings: Settings) -> Check:
    """Checks that the cluster's store answers this user's jobs, with the secret that they have."""
    if settings.store == "none":
        part = Part("store", "jobs do not coordinate: each runs without a plan")
        return part.missing("switched off: CRUX_STORE=none", "unset CRUX_STORE")
    part = Part("store", "jobs here do not coordinate with others until the store can be used")
    given = settings.store, settings.store_secret, settings.store_group
    try:
        client = open_store(*given, timeout_s=STORE_TIMEOUT_S, load_s=LOAD_S)
    except SettingsError as error:
        return part.broken(str(error), "correct the setting (docs/operate/store.md)")
    try:
        client.get(cluster_prefix(settings.cluster) + PLAN)
    except StoreError as error:
        known = looked_into(error, settings.store)
        found = part.missing if known.cause in _PASSING else part.broken
        return found(str(known), known.cause.value)
    finally:
        client.close()
    shared = sharing(*given)
    return part.ok(f"{settings.store} answers" + (f"; {shared}" if shared else ""))
