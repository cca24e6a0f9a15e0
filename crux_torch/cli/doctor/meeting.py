"""Exchange of facts between the processes of a job over a c10d store; every wait is bounded."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec

from crux_torch.cli.doctor.agreement import Facts, facts
from crux_torch.errors import CruxError

#: Set by a launcher for its processes.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Period of looking for answers.
POLL_S = 0.05
#: Limit of one attempt to connect.
CONNECT_S = 1.0
MAX_FACTS_BYTES = 1 << 16
SALT_BYTES = 16
#: Time for a store that the launcher may just be starting.
STORE_S = 3.0


class MeetingError(CruxError):
    """The processes of the job can't meet. Says why."""


@dataclass
class Met:
    """The facts that rank 0 received; see :func:`crux_torch.cli.doctor.agreement.compare`."""

    told: dict[int, Facts] = field(default_factory=dict)
    ahead_s: dict[int, float] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)


def is_launched(env: Mapping[str, str]) -> bool:
    """Returns True if a launcher gave this process its rank, and the address of the store."""
    return all(env.get(name) for name in VARIABLES)


def meet(env: Mapping[str, str], patience_s: float) -> Met | None:
    """Sends the facts about this process; returns everybody's on rank 0, None on other ranks.

    Args:
        env: of this process; it has ``VARIABLES``.
        patience_s: limit of each of three steps: rank 0 is there, all have sent their facts, all
            have sent the time.

    Raises:
        MeetingError: the store can't be reached, or rank 0 does not come.
    """
    try:
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        store = job_store(env, "crux-check", patience_s)
        if rank:
            _answer(store, rank, env, patience_s)
            return None
        return _ask(store, size, env, patience_s)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise MeetingError(
            f"rank {env['RANK']} can't meet the others at {env['MASTER_ADDR']}:"
            f"{env['MASTER_PORT']}: {reason}"
        ) from None


def job_store(env: Mapping[str, str], prefix: str, patience_s: float) -> Any:
    """Returns the store that the ranks of a job meet over; rank 0 serves it if nobody does.

    Args:
        env: of this process; it has ``VARIABLES``.
        prefix: of the keys.
        patience_s: limit of waiting for the store, and for a value in it.

    Raises:
        RuntimeError, ValueError, OSError: there is none.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    serves = int(env["RANK"]) == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true"
    if not serves:
        _await_server(host, port, patience_s)
    limit = timedelta(seconds=patience_s)
    store = TCPStore(host, port, None, serves, limit, wait_for_workers=False)
    return PrefixStore(f"{prefix}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_server(host: str, port: int, patience_s: float) -> None:
    """Wait until somebody listens; c10d would fill the screen while it waits."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host, port), CONNECT_S).close()
            return
        except OSError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(POLL_S)


def _answer(store: Any, rank: int, env: Mapping[str, str], patience_s: float) -> None:
    store.set(f"hello/{rank}", env.get("CRUX_HOST") or socket.gethostname())
    store.wait(["salt"], timedelta(seconds=patience_s))
    mine = facts(env, store.get("salt"), STORE_S)
    store.set(f"facts/{rank}", msgspec.json.encode(mine))
    # Rank 0 waits for others at most this long.
    store.wait(["go"], timedelta(seconds=2 * patience_s))
    store.set(f"time/{rank}", repr(time.time()))


def _ask(store: Any, size: int, env: Mapping[str, str], patience_s: float) -> Met:
    met, others = Met(), range(1, size)
    salt = secrets.token_bytes(SALT_BYTES)
    store.set("salt", salt)
    met.told[0] = facts(env, salt, STORE_S)

    def take_facts(rank: int, raw: bytes) -> None:
        if len(raw) <= MAX_FACTS_BYTES:
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                met.told[rank] = msgspec.json.decode(raw, type=Facts)

    _gather(store, "facts", others, patience_s, take_facts)
    for rank in others:
        if rank not in met.told:
            key = f"hello/{rank}"
            met.silent[rank] = store.get(key).decode() if store.check([key]) else ""
    began_s = time.time()
    store.set("go", b"")

    def take_time(rank: int, raw: bytes) -> None:
        # The rank read its clock after rank 0 began to ask, and before now: the rest is its offset.
        told_s, now_s = float(raw), time.time()
        met.ahead_s[rank] = max(told_s - now_s, 0.0) + min(told_s - began_s, 0.0)

    _gather(store, "time", [rank for rank in others if rank in met.told], patience_s, take_time)
    return met


def _gather(
    store: Any, kind: str, ranks: Any, patience_s: float, take: Callable[[int, bytes], None]
) -> None:
    """Take what each of ``ranks`` puts under ``kind``, until all have or the time is up."""
    missing = list(ranks)
    end_s = time.monotonic() + patience_s
    while missing:
        for rank in tuple(missing):
            if store.check([f"{kind}/{rank}"]):
                missing.remove(rank)
                take(rank, store.get(f"{kind}/{rank}"))
        if not missing or time.monotonic() >= end_s:
            return
        time.sleep(POLL_S)
