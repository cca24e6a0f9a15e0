"""Lets the processes of a discovery find each other: over ssh, or as ranks of a launched job."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from crux_torch.cli.discover.channel import Channel
from crux_torch.network.discover.tasks import DiscoverError
from crux_torch.network.formats.slurm import expand

#: Port of the store that ranks meet over where the launcher gives none (srun, mpirun).
MEET_PORT = 29450
#: Where launchers say a process's rank and the number of processes, in the order of their worth.
RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
COMMAND = ("topology", "discover")


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that a launcher started.

    Attributes:
        env: what torch needs to meet the others: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    """

    rank: int
    size: int
    env: Mapping[str, str]


class Place(msgspec.Struct, frozen=True):
    """Port that rank 0 listens on; the job's store tells it to the others."""

    port: int
    token: str


def launched(env: Mapping[str, str], meet: str = "") -> Launched | None:
    """Returns this process's rank; None if no launcher started it.

    Args:
        meet: HOST or HOST:PORT of rank 0, for launchers that don't say it.

    Raises:
        DiscoverError: the launcher does not say where rank 0 is, or says what can't be.
    """
    names = next((pair for pair in RANKS if all(env.get(name) for name in pair)), None)
    if names is None:
        return None
    try:
        rank, size = (int(env[name]) for name in names)
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise DiscoverError(
            f"{names[0]} is {env[names[0]]!r} and {names[1]} is {env[names[1]]!r}; expected a rank "
            "below the number of processes"
        )
    host, port = _meeting_place(env, meet)
    given = dict(env) | {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return Launched(rank, size, given | {"MASTER_ADDR": host, "MASTER_PORT": str(port)})


def _meeting_place(env: Mapping[str, str], meet: str) -> tuple[str, int]:
    host, _, port = meet.rpartition(":") if ":" in meet else (meet, "", "")
    host = host or env.get("MASTER_ADDR", "")
    nodes = env.get("SLURM_STEP_NODELIST", "")
    if not host and nodes:
        host = expand(nodes)[0]
    if not host:
        raise DiscoverError(
            "the launcher does not say where rank 0 is: add --meet HOST, the host of rank 0, or "
            "set MASTER_ADDR"
        )
    port = port or (env.get("MASTER_PORT", "") if not meet else "") or str(MEET_PORT)
    if not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise DiscoverError(f"{port!r} is no port to meet at; expected 1 to 65535")
    return host, int(port)


def host_all(channel: Channel, job: Launched, worker: Sequence[str], patience_s: float) -> object:
    """Let the other ranks connect, and start a process for this host. Rank 0 calls it.

    Returns:
        The job's store, to be kept until all have met.

    Raises:
        DiscoverError: the launcher's store can't be reached.
    """
    again = [sys.executable, "-m", "crux_torch.cli", *COMMAND]
    channel.spawn([*again, *worker, "--worker", "0"], "")
    if job.size == 1:
        return None
    token = secrets.token_hex(16)
    port = channel.listen(token)
    store = _store(job, patience_s)
    store.set("place", msgspec.json.encode(Place(port, token)))
    return store


def join_all(job: Launched, patience_s: float) -> tuple[socket.socket, str]:
    """Returns a connection to rank 0, and the token to say. The other ranks call it.

    Raises:
        DiscoverError: rank 0 can't be reached.
    """
    store = _store(job, patience_s)
    try:
        store.wait(["place"], timedelta(seconds=patience_s))
        place = msgspec.json.decode(store.get("place"), type=Place)
        connected = socket.create_connection((job.env["MASTER_ADDR"], place.port), patience_s)
    except OSError as error:
        raise DiscoverError(f"rank {job.rank} can't connect to rank 0: {error}") from None
    except (RuntimeError, msgspec.MsgspecError) as error:
        reason = str(error).partition("\n")[0]
        raise DiscoverError(f"rank 0 did not come: {reason}") from None
    connected.settimeout(None)
    return connected, place.token


def _store(job: Launched, patience_s: float) -> Any:
    # It needs scipy and torch, which hosts that are probed over ssh do without.
    from crux_torch.cli.doctor.meeting import job_store

    try:
        return job_store(job.env, "crux-discover", patience_s)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{job.env['MASTER_ADDR']}:{job.env['MASTER_PORT']}"
        reason = str(error).partition("\n")[0]
        raise DiscoverError(
            f"rank {job.rank} can't meet the others at {where}: {reason}; --meet names another "
            "place"
        ) from None


def spawn_over_ssh(
    channel: Channel, hosts: Sequence[str], ssh: str, remote: str, worker: Sequence[str]
) -> None:
    """Start a process on each host.

    Args:
        ssh: command that runs another one on a host: ``{}`` in it is the host, else it comes last.
        remote: ``crux`` there.
        worker: more arguments.

    Raises:
        DiscoverError: the command is not there.
    """
    for rank, host in enumerate(hosts):
        words = shlex.split(ssh)
        argv = [word.replace("{}", host) for word in words]
        argv += [host] if argv == words else []
        there = [*shlex.split(remote), *COMMAND, *worker, "--worker", str(rank), "--name", host]
        try:
            # ssh hands the words to a shell.
            channel.spawn([*argv, *map(shlex.quote, there)], host)
        except OSError as error:
            raise DiscoverError(f"--ssh: {argv[0]}: {error.strerror}") from None


def remote_command() -> str:
    """Returns ``crux`` by its path here, which hosts with a shared file system have, too."""
    found = shutil.which(sys.argv[0]) if os.path.basename(sys.argv[0]) == "crux" else None
    return shlex.quote(os.path.abspath(found)) if found else "crux"
