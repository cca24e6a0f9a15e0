"""The settings of Crux: one field of :class:`Settings` for each.

The field ``levels`` is the variable ``CRUX_LEVELS`` in every process of a job, and the flag
``--crux-levels`` of ``cruxrun``, which sets that variable for the job. A field's type says which
values are possible. The flags and the table in docs/settings.md are made from the fields.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from crux_torch.errors import SettingsError

# Types with bounds; a title completes the sentence "expected ...".
_FINITE = sys.float_info.max
_WORD = "up to 128 letters, digits and . _ : @ + -, the first a letter or digit"
_HOST = r"([\w.-]+|\[[\da-fA-F:.]+\])"
_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}\Z", title=_WORD)]
_ENDPOINTS = rf"tcp://{_HOST}:{_PORT}|etcd://{_HOST}:{_PORT}(,{_HOST}:{_PORT})*([/?]\S*)?"
Endpoint = Annotated[
    str,
    Meta(
        pattern=rf"\A(none|unix:(///\S*[^\s/])?|{_ENDPOINTS})\Z",
        title="unix:, unix:///PATH, tcp://HOST:PORT, etcd://HOST:PORT[,HOST:PORT][/PREFIX][?...], "
        "or none",
    ),
]
_GROUP = "the name or number of a group of this host"
Group = Annotated[str, Meta(pattern=r"\A([A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127})?\Z", title=_GROUP)]
Count = Annotated[int, Meta(ge=1, title="a whole number, 1 or more")]
LevelCount = Annotated[int, Meta(ge=1, le=64, title="a whole number from 1 to 64")]
Positive = Annotated[float, Meta(gt=0, le=_FINITE, title="a positive number")]
NotNegative = Annotated[float, Meta(ge=0, le=_FINITE, title="a number, 0 or more")]
#: At most what a store lets anything outlive its writer by.
Span = Annotated[float, Meta(ge=0.1, le=600, title="a number of seconds from 0.1 to 600")]
Tick = Annotated[float, Meta(ge=0.01, le=3600, title="a number of seconds from 0.01 to 3600")]
WaitMs = Annotated[float, Meta(gt=0, le=10_000, title="a number of milliseconds up to 10000")]
SixBits = Annotated[int, Meta(ge=0, le=63)]
Levels = Annotated[tuple[SixBits, ...], Meta(title="levels (0 to 63) separated by commas")]
DscpMap = Annotated[
    tuple[SixBits, ...],
    Meta(min_length=1, title="DSCP values (0 to 63) from level 0 upwards, separated by commas"),
]
_LINKS = f"auto, none, or different names of links separated by commas, each {_WORD}"
Links = Annotated[tuple[Name, ...], Meta(min_length=1, title=_LINKS)]
Port = Annotated[int, Meta(ge=1024, le=65535, title="a port from 1024 to 65535")]
SlotMs = Annotated[float, Meta(ge=5, le=1000, title="a number of milliseconds from 5 to 1000")]
#: The schedulers that a running cluster can carry out. They choose among the candidate paths and
#: the given levels, shift jobs in time, or pace flows. The others need what no network offers
#: (``ideal``), or too many levels (``crux-ps-pa``).
LIVE_POLICIES = (
    "crux", "crux-paper", "crux-pa", "cassini", "ecmp", "mlcc", "sincronia", "taccl", "varys",
)  # fmt: skip
#: Those that choose paths. Under the others, the network's own hash does.
PATH_POLICIES = ("crux", "crux-paper", "taccl")
_POLICIES = f"one of {', '.join(LIVE_POLICIES)} (`crux sim` plays the others)"
Policy = Annotated[str, Meta(pattern=rf"\A({'|'.join(LIVE_POLICIES)})\Z", title=_POLICIES)]


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports from ``first`` to ``last``, both included; written FIRST-LAST."""

    first: Port
    last: Port

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


Ports = Annotated[PortRange, Meta(title="FIRST-LAST, ports from 1024 to 65535")]


_Marks = Annotated[tuple[SixBits, ...], Meta(max_length=64)]


class Marks(msgspec.Struct, frozen=True):
    """The DSCP values that Crux may send with; none by default.

    Attributes:
        tcp, rdma: of TCP connections and of queue pairs: the value of each level, from level 0
            upwards. Empty: they are not marked.
        usable: the levels that Crux may use, ascending.
    """

    tcp: _Marks = ()
    rdma: _Marks = ()
    usable: _Marks = ()

    def __bool__(self) -> bool:
        return bool(self.tcp or self.rdma)

    @property
    def are_sound(self) -> bool:
        """True if the usable levels ascend and have values; others' records may hold anything."""
        ascending = self.usable == tuple(sorted(set(self.usable)))
        known = min(len(values) for values in (self.tcp, self.rdma) if values) if self else 0
        return ascending and len(self.usable) > 0 and self.usable[-1] < known

    @property
    def measuring_level(self) -> int:
        """The highest usable level: held by the one job that is being measured."""
        return max(self.usable, default=0)

    @property
    def plan_levels(self) -> tuple[int, ...]:
        """The levels that a plan may assign, ascending: all usable ones below the measuring level.

        With a single usable level there is nothing to order, and the plan uses that one. Without
        marks a level has no effect, and there is level 0 alone.
        """
        return (self.usable[:-1] or self.usable or (0,)) if self else (0,)


def _says(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Settings:
    """What Crux reads from its environment.

    Raises:
        SettingsError: values don't fit each other. :meth:`from_env` also raises it for a value that
            can't be used.
    """

    disable: bool = _says(False, "use the stock backends and leave every connection alone")
    attach: bool = _says(False, "make the script's own init_process_group use Crux; set by cruxrun")
    store: Endpoint = _says(
        "unix:",
        "the store that the cluster's jobs share: unix: (of this user's jobs on one host), "
        "unix:///PATH, tcp://HOST:PORT, etcd://... (docs/store.md), or none",
    )
    store_secret: str = _says(
        "",
        "file with the secret of the embedded store, which only its user may read; all hosts need "
        "the same; a store on one host needs none",
    )
    store_group: Group = _says(
        "",
        "group of users who share what is otherwise this user's alone on a host: the store unix:, "
        "load tables, and links; by default, nobody",
    )
    cluster: Name = _says("default", "name of the cluster: the first part of its keys in the store")
    job: Name = _says("", "name of the job in the cluster; by default, cruxrun makes one")
    host: Name = _says("", "name of this host in the topology file; by default, its host name")
    levels: LevelCount = _says(
        8, "number of priority levels of NICs and switches, including reserved ones"
    )
    reserved_levels: Levels = _says((), "levels that Crux must not use, separated by commas")
    dscp_map: DscpMap = _says(
        (),
        "DSCP values that Crux may set on TCP connections: one for each level, from level 0 "
        "upwards, separated by commas; without it none is set, unless the topology has `qos`",
    )
    rdma_dscp_map: DscpMap = _says(
        (), "likewise for queue pairs (RoCE), all values with the same PFC and ECN treatment"
    )
    override_ib_tc: bool = _says(
        False, "let the class of the job's level go before NCCL_IB_TC and a program's own class"
    )
    dry_run: bool = _says(
        False, "measure, plan and show; mark no connection, take no path, hold nothing back"
    )
    policy: Policy = _says(
        "crux", f"the scheduler that computes the plan: {', '.join(LIVE_POLICIES)}"
    )
    max_slowdown: NotNegative = _says(
        3.0,
        "with the policy crux, levels may make a job's mean iteration at most this many times as "
        "long as alone; 0 means no bound",
    )
    guard: bool = _says(
        True,
        "with the policy crux, try levels out: a component's jobs are measured before, and a plan "
        "that does worse is taken back",
    )
    topology: str = _says(
        "",
        "file with the cluster's topology (YAML); without it, Crux chooses no paths, and the "
        "policy crux gives all jobs one level",
    )
    dispatch: str = _says(
        "",
        "cruxrun chooses the GPUs of --nproc-per-node ranks among the free ones of this host: auto "
        "(by NVLinks and PCIe switches), or the file of a table of `crux dispatch measure`",
    )
    transport: bool = _says(
        True, "preload libcrux_transport.so, which sets source ports and settings of queue pairs"
    )
    paths: bool = _says(True, "apply the paths of the plan")
    ports: Ports = _says(
        PortRange(20000, 28999),
        "TCP source ports that Crux may bind to choose paths: FIRST-LAST; it leaves out those that "
        "the kernel or another socket holds",
    )
    nccl_class: bool = _says(True, "set the traffic class of each new NCCL communicator")
    roce_ecn: Literal["auto", "0", "1", "2"] = _says(
        "auto",
        "ECN bits of queue pairs: 0 (not capable), 1 (ECT(1)), 2 (ECT(0)), or auto: as the host's "
        "RoCE devices are configured",
    )
    links: Links = _says(
        ("none",),
        "links of the host on which operations of lower levels wait for higher ones: none, auto "
        "(the PCIe links that this process crosses), or names of stand-in links",
    )
    link_wait_ms: WaitMs = _says(
        500.0,
        "the longest that an operation waits on the host's links, in milliseconds (up to 10000)",
    )
    switch_groups: Literal["auto", "all", "none"] = _says(
        "auto",
        "groups that may get new connections: all, none, or auto: all but those over NCCL where "
        "paths are off, or every RDMA device can change live queue pairs; those that may not keep "
        "torch's own backend if torch has hooks enough",
    )
    switch_timeout_s: Positive = _says(
        30.0,
        "seconds that ranks wait for each other before they give up a switch to new connections; "
        "on a device also the longest that an operation waits for a switch",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = _says(
        "WARNING",
        "the least severe messages that Crux writes to stderr: debug, info, warning or error",
    )
    profile_s: Positive = _says(
        10.0, "the longest that a job holds the top level to be measured, in seconds"
    )
    profile_iterations: Count = _says(
        12, "number of iterations after which a measurement may end early"
    )
    warmup_iterations: Count = _says(
        3, "number of iterations that a job runs before it is measured"
    )
    timing: Literal["measuring", "always"] = _says(
        "measuring",
        "when the recorder times operations: measuring (while the job is measured, or with a "
        "trace) or always; at other times it records only the call, at a third of the cost",
    )
    tables_port: Port = _says(
        29412,
        "with the policy mlcc, TCP port of the load tables on the host that the topology names",
    )
    slot_ms: SlotMs = _says(
        60.0, "with the policy mlcc, milliseconds for which a flow keeps a rate; where tables start"
    )
    lease_s: Span = _says(
        6.0, "seconds after which a job that gives no sign of life counts as gone"
    )
    plan_valid_s: Span = _says(15.0, "seconds after which a plan that nobody renews is dropped")
    start_s: Span = _says(
        3.0,
        "seconds from the first process group until the background thread begins, unless two "
        "iterations end before",
    )
    tick_s: Tick = _says(0.1, "seconds between two rounds of the background thread")
    records: Count = _says(65536, "number of records that the recorder's ring holds")
    device_flops: NotNegative = _says(
        0.0,
        "FLOP/s of one device, to estimate W from time and to bound what jobs claim; 0 means that "
        "Crux looks it up",
    )
    trace: str = _says("", "folder in which every rank writes a Chrome trace at exit")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """The settings in ``env`` (default: this process's). An empty variable is the default."""
        source = os.environ if env is None else env
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            text = source.get(setting.env)
            if not text:
                continue
            try:
                values[setting.field] = setting.parse(text)
            except ValueError as error:
                raise SettingsError(f"{setting.env}={text!r}: {error}") from None
        return cls(**values)

    def __post_init__(self) -> None:
        maps = {"CRUX_DSCP_MAP": self.dscp_map, "CRUX_RDMA_DSCP_MAP": self.rdma_dscp_map}
        for name, values in maps.items():
            if values and len(values) < self.levels:
                raise SettingsError(
                    f"{name} names {len(values)} DSCP values but CRUX_LEVELS is {self.levels}: "
                    "give one value for each level, or fewer levels"
                )
            used = values[: self.levels]
            if len(set(used)) < len(used):
                given = ",".join(map(str, values))
                raise SettingsError(f"{name}={given!r}: expected another value for each level")
        if any(level >= self.levels for level in self.reserved_levels):
            given = ",".join(map(str, self.reserved_levels))
            raise SettingsError(
                f"CRUX_RESERVED_LEVELS={given!r}: expected only levels below CRUX_LEVELS, which is "
                f"{self.levels}"
            )
        if not self.usable_levels:
            raise SettingsError("CRUX_RESERVED_LEVELS leaves no level to use: reserve fewer")
        if 0 < self.max_slowdown < 1:
            expected = "a number of 1 or more, or 0 for no bound"
            raise SettingsError(f"CRUX_MAX_SLOWDOWN={self.max_slowdown:g}: expected {expected}")
        alone = {"auto", "none"}.isdisjoint(self.links) or len(self.links) == 1
        if not alone or len(set(self.links)) < len(self.links):
            raise SettingsError(f"CRUX_LINKS={','.join(self.links)!r}: expected {_LINKS}")

    @property
    def usable_levels(self) -> tuple[int, ...]:
        """The levels that Crux may use, ascending."""
        return tuple(n for n in range(self.levels) if n not in self.reserved_levels)

    @property
    def marks(self) -> Marks:
        """The DSCP maps of the settings; the topology's ``qos`` is not part of them."""
        if not (self.dscp_map or self.rdma_dscp_map):
            return Marks()
        n = self.levels
        return Marks(self.dscp_map[:n], self.rdma_dscp_map[:n], self.usable_levels)

    @property
    def control_dscp(self) -> int:
        """The class of short messages that decide about traffic: that of the highest level.

        0, the network's default, where Crux may not mark TCP connections.
        """
        tcp = self.marks.tcp
        return tcp[self.marks.measuring_level] if tcp and not self.dry_run else 0


class Setting(NamedTuple):
    """One field of :class:`Settings`, as users see it. ``meaning`` has no full stop."""

    field: str
    kind: Any
    default: Any
    meaning: str

    @property
    def env(self) -> str:
        """The environment variable."""
        return f"CRUX_{self.field.upper()}"

    @property
    def flag(self) -> str | None:
        """The flag of ``cruxrun``, or None for what only ``cruxrun`` itself sets.

        A flag without a value sets the opposite of the default.
        """
        name = self.field.replace("_", "-")
        return None if name == "attach" else f"--crux-{'no-' if self.default is True else ''}{name}"

    @property
    def default_text(self) -> str:
        """The default as it would be written in the variable."""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        number = isinstance(self.default, (bool, float))
        return f"{self.default:g}" if number else str(self.default)

    def parse(self, text: str) -> Any:
        """The value that ``text`` stands for; a ValueError says what was expected."""
        base, expected = self.kind, "text"
        if get_origin(base) is Annotated:
            base, meta = get_args(base)
            expected = meta.title
        if base is bool:
            expected = "one of 1, 0, true, false, yes, no, on, off"
        elif get_origin(base) is Literal:
            expected = f"one of {', '.join(get_args(base))}"
        try:
            return msgspec.convert(_builtin(base, text.strip()), self.kind, strict=False)
        except (ValueError, msgspec.ValidationError):
            raise ValueError(f"expected {expected}") from None


def _builtin(kind: Any, text: str) -> Any:
    """``text`` as the plain value that msgspec converts to ``kind``."""
    if kind is bool:
        return {"yes": "1", "on": "1", "no": "0", "off": "0"}.get(text.lower(), text)
    if kind in (int, float):
        return kind(text)
    if kind is PortRange:
        first, last = map(int, text.split("-"))
        return {"first": first, "last": last} if first <= last else None
    if get_origin(kind) is Literal:
        return next((c for c in get_args(kind) if c.lower() == text.lower()), text)
    if get_origin(kind) is tuple:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [int(part, 0) for part in parts] if get_args(kind)[0] is SixBits else parts
    return text


_KINDS = get_type_hints(Settings, include_extras=True)
#: Every setting, in the order of the fields: the source of `cruxrun --help` and of the docs.
SETTINGS = tuple(
    Setting(f.name, _KINDS[f.name], f.default, f.metadata["meaning"]) for f in fields(Settings)
)


def settings_table() -> str:
    """Every setting as a Markdown table: what docs/settings.md shows."""
    rows = ["| variable | flag of cruxrun | default | meaning |", "|---|---|---|---|"]
    for s in SETTINGS:
        flag = f"`{s.flag}`" if s.flag else ""
        default = f"`{s.default_text}`" if s.default_text else ""
        rows.append(f"| `{s.env}` | {flag} | {default} | {s.meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())
