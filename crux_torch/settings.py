"""One settings object: every ``CRUX_*`` environment variable, its meaning and its default.

``cruxrun`` turns its ``--crux-*`` flags into these variables, and every process of the job reads
them from its environment, so that a flag, a variable and a field are three names of one thing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from crux_torch.errors import SettingsError
from crux_torch.schedule.live import LIVE_POLICIES

#: DSCP class selector n of RFC 2474 for level n: the three bits that switches map to queues.
CLASS_SELECTORS = tuple(8 * n for n in range(8))


#: What a job or a cluster may be called: a part of the store's keys and a cell of `crux status`.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")


def _setting(
    env: str, default: Any, meaning: str, parse: Callable[[str], Any], *, flag: bool = True
) -> Any:
    metadata = {"env": env, "meaning": meaning, "parse": parse, "flag": flag}
    return field(default=default, metadata=metadata)


def _bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected one of 1, 0, true, false, yes, no, on, off")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("expected a positive number")
    return value


def _non_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("expected a number, 0 or more")
    return value


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("expected a whole number, 1 or more")
    return int(text)


def _levels(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= 64:
        raise ValueError("expected a whole number from 1 to 64")
    return int(text)


def _integers(text: str, expected: str) -> tuple[int, ...]:
    """Comma-separated whole numbers from 0 to 63, decimal or 0x…; an error says ``expected``."""
    try:
        values = tuple(int(part, 0) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(expected) from None
    if any(not 0 <= value < 64 for value in values):
        raise ValueError(expected)
    return values


def _reserved(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(_integers(text, "expected levels (0 to 63) separated by commas"))))


def _dscp_map(text: str) -> tuple[int, ...]:
    expected = "expected DSCP values (0 to 63) from level 0 upwards, separated by commas"
    values = _integers(text, expected)
    if not values:
        raise ValueError(expected)
    return values


def _store(text: str) -> str:
    if text == "none":
        return text
    url = urlsplit(text)
    if url.scheme != "tcp" or not url.hostname or not url.port or url.path or url.query:
        raise ValueError("expected tcp://HOST:PORT, or none")
    return text


def _name(text: str) -> str:
    if not NAME_PATTERN.fullmatch(text):
        raise ValueError(
            "expected up to 128 letters, digits and . _ : @ + -, the first a letter or digit"
        )
    return text


def _policy(text: str) -> str:
    if text not in LIVE_POLICIES:
        raise ValueError(
            f"expected one of {', '.join(LIVE_POLICIES)} (`crux sim` plays the others)"
        )
    return text


def _slowdown(text: str) -> float:
    value = float(text)
    if value != 0.0 and not 1.0 <= value < float("inf"):
        raise ValueError("expected a number of 1 or more, or 0 for no bound")
    return value


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports from ``first`` to ``last``, both included; written FIRST-LAST."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def _ports(text: str) -> PortRange:
    match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text, re.ASCII)
    found = PortRange(int(match[1]), int(match[2])) if match else PortRange(0, 0)
    if not 1024 <= found.first <= found.last <= 65535:
        raise ValueError("expected FIRST-LAST, ports from 1024 to 65535")
    return found


def _links(text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    bad = [name for name in names if not NAME_PATTERN.fullmatch(name)]
    if bad or len(set(names)) < len(names) or (len(names) > 1 and {"auto", "none"} & set(names)):
        raise ValueError(
            "expected auto, none, or different names of links separated by commas, each up to 128 "
            "letters, digits and . _ : @ + -, the first a letter or digit"
        )
    return ",".join(names)


def _link_wait_ms(text: str) -> float:
    value = _positive(text)
    if value > 10_000:
        raise ValueError("expected a number of milliseconds up to 10000")
    return value


def _ecn(text: str) -> str:
    value = text.strip().lower()
    if value not in ("auto", "0", "1", "2"):
        raise ValueError("expected auto, 0, 1 or 2")
    return value


def _timing(text: str) -> str:
    if text not in ("measuring", "always"):
        raise ValueError("expected measuring or always")
    return text


def _log_level(text: str) -> str:
    value = text.strip().upper()
    if value not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("expected debug, info, warning or error")
    return value


@dataclass(frozen=True, slots=True)
class Settings:
    """What Crux reads from its environment.

    Raises:
        SettingsError: by :meth:`from_env`, for a value that can't be used.
    """

    disable: bool = _setting(
        "CRUX_DISABLE", False, "use the stock backends and leave every connection alone", _bool
    )
    attach: bool = _setting(
        "CRUX_ATTACH",
        False,
        "make the script's own init_process_group use Crux; set by cruxrun",
        _bool,
        flag=False,
    )
    store: str = _setting(
        "CRUX_STORE",
        "tcp://127.0.0.1:29410",
        "the store shared by the cluster's jobs: tcp://HOST:PORT (embedded), or none",
        _store,
    )
    cluster: str = _setting(
        "CRUX_CLUSTER", "default", "prefix of everything this cluster writes to the store", _name
    )
    job: str = _setting(
        "CRUX_JOB", "", "name of this job in the cluster; by default made from the run id", _name
    )
    host: str = _setting(
        "CRUX_HOST", "", "name of this host in the topology; default: its host name", _name
    )
    levels: int = _setting(
        "CRUX_LEVELS",
        8,
        "priority levels that NICs and switches have, reserved ones included",
        _levels,
    )
    reserved_levels: tuple[int, ...] = _setting(
        "CRUX_RESERVED_LEVELS", (), "levels that Crux must not use, separated by commas", _reserved
    )
    dscp_map: tuple[int, ...] = _setting(
        "CRUX_DSCP_MAP",
        CLASS_SELECTORS,
        "DSCP value of each level, from level 0 upwards, separated by commas",
        _dscp_map,
    )
    policy: str = _setting(
        "CRUX_POLICY",
        "crux",
        f"the scheduler that computes the plan: {', '.join(LIVE_POLICIES)}",
        _policy,
    )
    max_slowdown: float = _setting(
        "CRUX_MAX_SLOWDOWN",
        0.0,
        "with policy crux-fair: an iteration takes at most so many times as long as alone, in the "
        "mean; 0: no bound",
        _slowdown,
    )
    topology: str = _setting(
        "CRUX_TOPOLOGY",
        "",
        "file with the cluster's topology (YAML); without it, one shared core",
        str,
    )
    transport: bool = _setting(
        "CRUX_TRANSPORT",
        True,
        "load libcrux_transport.so first in every process of the job, to set source ports and "
        "queue pairs",
        _bool,
    )
    paths: bool = _setting(
        "CRUX_PATHS",
        True,
        "carry out the paths of the plan, besides its priorities",
        _bool,
    )
    ports: PortRange = _setting(  # noqa: RUF009 - it makes a field
        "CRUX_PORTS",
        PortRange(20000, 28999),
        "TCP source ports to choose paths with, FIRST-LAST, less what the kernel or another "
        "socket holds",
        _ports,
    )
    live_qp: bool = _setting(
        "CRUX_LIVE_QP",
        False,
        "let live queue pairs be changed by drain and reset, where their owner allows it",
        _bool,
    )
    nccl_class: bool = _setting(
        "CRUX_NCCL_CLASS",
        True,
        "give each new NCCL communicator its traffic class; NCCL_IB_TC and the script's own win",
        _bool,
    )
    roce_ecn: str = _setting(
        "CRUX_ROCE_ECN",
        "auto",
        "ECN bits beside the DSCP of queue pairs: 0 (not capable), 1 (ECT(1)), 2 (ECT(0)), or "
        "auto: as the host's RoCE devices are configured",
        _ecn,
    )
    nccl_profiler: bool = _setting(
        "CRUX_NCCL_PROFILER",
        False,
        "load the NCCL profiler plugin: bytes and time that each NCCL communicator spends on the "
        "network; NCCL loads one plugin, and the user's own wins",
        _bool,
    )
    links: str = _setting(
        "CRUX_LINKS",
        "auto",
        "links of the host where operations of lower levels give way: auto (PCIe links that "
        "another job of this user crosses too), none, or names of stand-in links that this process "
        "crosses",
        _links,
    )
    link_wait_ms: float = _setting(
        "CRUX_LINK_WAIT_MS",
        500.0,
        "milliseconds that an operation gives way on the host's links, at most (up to 10000)",
        _link_wait_ms,
    )
    switch_timeout_s: float = _setting(
        "CRUX_SWITCH_TIMEOUT_S",
        30.0,
        "seconds that ranks wait for one another in a switch to new connections, before none does",
        _positive,
    )
    log_level: str = _setting(
        "CRUX_LOG_LEVEL", "WARNING", "how much Crux says on stderr", _log_level
    )
    profile_s: float = _setting(
        "CRUX_PROFILE_S",
        10.0,
        "seconds for which a job holds the top class to be measured, at most",
        _positive,
    )
    profile_iterations: int = _setting(
        "CRUX_PROFILE_ITERATIONS", 12, "iterations after which a measurement may end early", _count
    )
    warmup_iterations: int = _setting(
        "CRUX_WARMUP_ITERATIONS", 3, "iterations that pass before a job is measured", _count
    )
    timing: str = _setting(
        "CRUX_TIMING",
        "measuring",
        "when the recorder finds out how long operations take, which costs more than to see that "
        "they are issued: measuring, or always, as with a trace",
        _timing,
    )
    lease_s: float = _setting(
        "CRUX_LEASE_S", 6.0, "seconds after which a silent job counts as gone", _positive
    )
    plan_valid_s: float = _setting(
        "CRUX_PLAN_VALID_S",
        15.0,
        "seconds without renewal after which a plan is dropped",
        _positive,
    )
    tick_s: float = _setting(
        "CRUX_TICK_S", 0.1, "pause between two rounds of the background thread", _positive
    )
    records: int = _setting(
        "CRUX_RECORDS", 65536, "capacity of the recorder's ring, in records", _count
    )
    device_flops: float = _setting(
        "CRUX_DEVICE_FLOPS",
        0.0,
        "FLOP/s of one device, for time-based W and for bounding claims; 0: look it up",
        _non_negative,
    )
    trace: str = _setting(
        "CRUX_TRACE", "", "folder for a Chrome trace of every rank, written at exit", str
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """The settings in ``env`` (default: this process's environment)."""
        source = os.environ if env is None else env
        values: dict[str, Any] = {}
        for f in fields(cls):
            name = f.metadata["env"]
            text = source.get(name)
            if text is None or text == "":
                continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except ValueError as error:
                raise SettingsError(f"{name}={text!r}: {error}") from None
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if len(self.dscp_map) < self.levels:
            raise SettingsError(
                f"CRUX_DSCP_MAP names {len(self.dscp_map)} DSCP values but CRUX_LEVELS is "
                f"{self.levels}: give one value for each level, or fewer levels"
            )
        if not self.usable_levels:
            raise SettingsError("CRUX_RESERVED_LEVELS leaves no level to use: reserve fewer")

    @property
    def usable_levels(self) -> tuple[int, ...]:
        """The levels that Crux may use, ascending."""
        return tuple(n for n in range(self.levels) if n not in self.reserved_levels)

    @property
    def profiling_level(self) -> int:
        """The highest usable level: held by the one job that is being measured."""
        return self.usable_levels[-1]

    @property
    def plan_levels(self) -> tuple[int, ...]:
        """The levels that a plan may assign, ascending: all usable ones below the profiling level.

        With a single usable level there is nothing to order, and the plan uses that one.
        """
        return self.usable_levels[:-1] or self.usable_levels


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of :class:`Settings` as its user meets it.

    Attributes:
        field: name of the field.
        env: the environment variable.
        flag: the flag of ``cruxrun``, or None for what only ``cruxrun`` itself sets.
        meaning: one clause, no full stop.
        default: the default as it would be written in the variable; empty where there is none.
        parse: text to value; raises ValueError.
        switch: what the flag makes of the variable, where it takes no value; else None.
    """

    field: str
    env: str
    flag: str | None
    meaning: str
    default: str
    parse: Callable[[str], Any]
    switch: str | None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flag(name: str, default: Any) -> str:
    """``--crux-NAME``, or ``--crux-no-NAME`` for what is on by default."""
    return f"--crux-{'no-' if default is True else ''}{name.replace('_', '-')}"


#: Every setting, in the order of the fields: the source of `cruxrun --help` and of the docs.
SETTINGS: tuple[Setting, ...] = tuple(
    Setting(
        field=f.name,
        env=f.metadata["env"],
        flag=_flag(f.name, f.default) if f.metadata["flag"] else None,
        meaning=f.metadata["meaning"],
        default=_text(f.default),
        parse=f.metadata["parse"],
        switch=_text(not f.default) if isinstance(f.default, bool) else None,
    )
    for f in fields(Settings)
)


def settings_table() -> str:
    """Every setting as a Markdown table: what docs/settings.md shows."""
    rows = ["| variable | flag of cruxrun | default | meaning |", "|---|---|---|---|"]
    for s in SETTINGS:
        flag = f"`{s.flag}`" if s.flag else ""
        default = f"`{s.default}`" if s.default else ""
        rows.append(f"| `{s.env}` | {flag} | {default} | {s.meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())
