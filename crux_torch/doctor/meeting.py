"""Where the processes of a job meet to be compared: a c10d store, and nothing waits for ever."""

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

from crux_torch.doctor.facts import Facts, facts
from crux_torch.errors import CruxError

#: What a launcher tells its processes.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Seconds between two looks at who has answered.
LOOK_S = 0.05
#: Seconds of one attempt to connect.
CONNECT_S = 1.0
MAX_FACTS_BYTES = 1 << 16
SALT_BYTES = 16
#: Seconds that a store gets which the launcher may just be starting.
STORE_S = 3.0


class MeetingError(CruxError):
    """The processes of the job can't meet: why."""


@dataclass
class Met:
    """The facts that rank 0 received; see :func:`crux_torch.doctor.agreement.compare`."""

    told: dict[int, Facts] = field(default_factory=dict)
    ahead_s: dict[int, float] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)


def is_launched(env: Mapping[str, str]) -> bool:
    """True if a launcher told this process which rank it is, and where ranks meet."""
    return all(env.get(name) for name in VARIABLES)


def meet(env: Mapping[str, str], patience_s: float) -> Met | None:
    """Tell the others about this process, and on rank 0 hear them all; None on other ranks.

    Args:
        env: of this process; it has ``VARIABLES``.
        patience_s: seconds that each of three steps may take: that rank 0 is there, that all have
            told their facts, that all have told the time.

    Raises:
        MeetingError: the store can't be reached, or rank 0 does not come.
    """
    try:
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        store = _store(env, rank, patience_s)
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


def _store(env: Mapping[str, str], rank: int, patience_s: float) -> Any:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true"
    if not serves:
        _await_server(host, port, patience_s)
    limit = timedelta(seconds=patience_s)
    store = TCPStore(host, port, None, serves, limit, wait_for_workers=False)
    return PrefixStore(f"crux-check/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


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
            time.sleep(LOOK_S)


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
        # It was told after rank 0 began to ask, and before now: beyond that the clock is off.
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
        time.sleep(LOOK_S)
