"""Settings of Crux, read from environment variables.

Each field of :class:`Settings` is one setting. The field ``levels`` is the variable ``CRUX_LEVELS``
in every process of a job, and the flag ``--crux-levels`` of ``cruxrun``, which sets that variable.
Fields made by ``_tuning`` are for tests and experiments and have neither: the one variable
``CRUX_TUNING=name=value,name=value`` sets them. A field's type bounds its values. The flags and the
table in docs/operate/settings.md are made from the fields.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from crux_torch.booleans import is_true, parse_boolean
from crux_torch.errors import SettingsError

TUNING_VARIABLE = "CRUX_TUNING"
#: True where the end of ``import torch`` is to attach Crux: ``cruxrun`` and ``crux env`` set it.
ATTACH_VARIABLE = "CRUX_ATTACH"
#: "1" in the processes that ``cruxrun`` starts: it hosts the store, and names the job.
LAUNCHED_VARIABLE = "CRUX_LAUNCHED"
#: The process whose job ``CRUX_JOB`` names: empty in a job's ranks before they make a group. The
#: processes that a rank starts inherit both.
JOB_OF_VARIABLE = "CRUX_JOB_OF"
#: File into which the job's leader writes its summary, for the ``cruxrun`` of its host.
SUMMARY_VARIABLE = "CRUX_SUMMARY"
#: Variables that are no settings: of the launcher and the transport, then of build, lab and tests.
OTHER_VARIABLES = (
    TUNING_VARIABLE, ATTACH_VARIABLE, LAUNCHED_VARIABLE, JOB_OF_VARIABLE, SUMMARY_VARIABLE,
    "CRUX_LD_PRELOAD_THEN", "CRUX_TRANSPORT_LOG", "CRUX_TRANSPORT_PROBE_MS",
    "CRUX_TRANSPORT_ROUTES", "CRUX_TRANSPORT_ROUTE_LINES", "CRUX_TRANSPORT_SKIP_PORTS",
    "CRUX_TRANSPORT_STEER_ALL",
    "CRUX_BUILD", "CRUX_DEMO_USER_NAMESPACE", "CRUX_FAULT_ROUNDS", "CRUX_FAULT_RUNS",
    "CRUX_FAULT_SEED", "CRUX_GPU_RESULTS", "CRUX_GPU_SWITCHES", "CRUX_LAB_LIBNCCL",
    "CRUX_SOAK_MINUTES", "CRUX_SOAK_SEED", "CRUX_TEST_GPU",
)  # fmt: skip

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
#: At most the store's longest lease.
Span = Annotated[float, Meta(ge=0.1, le=600, title="a number of seconds from 0.1 to 600")]
Tick = Annotated[float, Meta(ge=0.01, le=3600, title="a number of seconds from 0.01 to 3600")]
WaitMs = Annotated[float, Meta(gt=0, le=10_000, title="a number of milliseconds up to 10000")]
SixBits = Annotated[int, Meta(ge=0, le=63)]
Levels = Annotated[tuple[SixBits, ...], Meta(title="levels (0 to 63) separated by commas")]
DscpMap = Annotated[
    tuple[SixBits, ...],
    Meta(min_length=1, title="DSCP values (0 to 63) from level 0 upwards, separated by commas"),
]
_PROGRAM = r"\A[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}:\d{1,2}\Z"
Ranks = Annotated[
    tuple[Annotated[int, Meta(ge=0)], ...], Meta(title="ranks (0 or more) separated by commas")
]
Programs = Annotated[
    tuple[Annotated[str, Meta(pattern=_PROGRAM)], ...],
    Meta(title="NAME:LEVEL,NAME:LEVEL,...: names without colons, and the highest level of each"),
]
_LINKS = f"auto, none, or different names of links separated by commas, each {_WORD}"
Links = Annotated[tuple[Name, ...], Meta(min_length=1, title=_LINKS)]
Port = Annotated[int, Meta(ge=1024, le=65535, title="a port from 1024 to 65535")]
_OR_ZERO = "a port from 1024 to 65535, or 0"
MetricsPort = Annotated[int, Meta(ge=0, le=65535, title=_OR_ZERO)]
SlotMs = Annotated[float, Meta(ge=5, le=1000, title="a number of milliseconds from 5 to 1000")]
#: Schedulers that work on a running cluster. The others need what no network offers (``ideal``), or
#: too many levels (``crux-ps-pa``).
LIVE_POLICIES = (
    "crux", "crux-paper", "crux-pa", "cassini", "ecmp", "mlcc", "sincronia", "taccl", "varys",
)  # fmt: skip
#: Schedulers that choose paths; under the others the network's own hash (ECMP) does.
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
        tcp, rdma: DSCP value of each level, from level 0 upwards, for TCP connections and for
            queue pairs; empty if they are not marked.
        usable: levels that Crux may use, ascending.
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


def _setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


def _tuning(default: Any) -> Any:
    return field(default=default, metadata={"meaning": ""})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one process.

    Raises:
        SettingsError: values don't fit each other.
    """

    disable: bool = _setting(False, "use the stock backends and leave every connection alone")
    store: Endpoint = _setting(
        "unix:",
        "the store that the cluster's jobs share: unix: (of this user's jobs on one host), "
        "unix:///PATH, tcp://HOST:PORT, etcd://... (docs/operate/store.md), or none",
    )
    store_secret: str = _setting(
        "",
        "file with the secret of the embedded store, which only its user may read; all hosts need "
        "the same; a store on one host needs none",
    )
    store_group: Group = _setting(
        "",
        "group of users who share what is otherwise this user's alone on a host: the store unix:, "
        "load tables, and links; by default, nobody",
    )
    cluster: Name = _setting(
        "default", "name of the cluster: the first part of its keys in the store"
    )
    job: Name = _setting("", "name of the job in the cluster; by default, cruxrun makes one")
    host: Name = _setting("", "name of this host in the topology file; by default, its host name")
    levels: LevelCount = _setting(
        8, "number of priority levels of NICs and switches, including reserved ones"
    )
    reserved_levels: Levels = _setting((), "levels that Crux must not use, separated by commas")
    dscp_map: DscpMap = _setting(
        (),
        "DSCP values that Crux may set on TCP connections: one for each level, from level 0 "
        "upwards, separated by commas; without it none is set, unless the topology has `qos`",
    )
    rdma_dscp_map: DscpMap = _setting(
        (), "likewise for queue pairs (RoCE), all values with the same PFC and ECN treatment"
    )
    programs: Programs = _setting(
        (),
        "names under which `crux exec` may mark programs that are no jobs, each with its highest "
        "level: NAME:LEVEL,NAME:LEVEL; a topology with `qos` says it there",
    )
    override_ib_tc: bool = _setting(
        False, "let the class of the job's level go before NCCL_IB_TC and a program's own class"
    )
    dry_run: bool = _setting(
        False, "measure, plan and show; mark no connection, take no path, hold nothing back"
    )
    policy: Policy = _setting(
        "crux", f"the scheduler that computes the plan: {', '.join(LIVE_POLICIES)}"
    )
    max_slowdown: NotNegative = _setting(
        3.0,
        "with the policy crux, levels may make a job's mean iteration at most this many times as "
        "long as alone; 0 means no bound",
    )
    guard: bool = _setting(
        True,
        "with the policy crux, try levels out: a component's jobs are measured before, and a plan "
        "that does worse is taken back",
    )
    servers: Ranks = _setting(
        (),
        "with the policy mlcc, the job's ranks that are parameter servers, separated by commas; "
        "without it, its flows form rings",
    )
    topology: str = _setting(
        "",
        "file with the cluster's topology (YAML); without it, jobs look for the network",
    )
    discovery: bool = _setting(True, "look for the network's paths, by probes and by traces")
    dispatch: str = _setting(
        "",
        "cruxrun chooses the GPUs of --nproc-per-node ranks among the free ones of this host: auto "
        "(by NVLinks and PCIe switches), or the file of a table of `crux dispatch measure`",
    )
    transport: bool = _setting(
        True, "preload libcrux_transport.so, which sets source ports and settings of queue pairs"
    )
    paths: bool = _setting(True, "apply the paths of the plan")
    ports: Ports = _setting(
        PortRange(20000, 28999),
        "TCP source ports that Crux may bind to choose paths: FIRST-LAST; it leaves out those that "
        "the kernel or another socket holds",
    )
    roce_ecn: Literal["auto", "0", "1", "2"] = _setting(
        "auto",
        "ECN bits of queue pairs: 0 (not capable), 1 (ECT(1)), 2 (ECT(0)), or auto: as the host's "
        "RoCE devices are configured",
    )
    links: Links = _setting(
        ("none",),
        "links of the host on which operations of lower levels wait for higher ones: none, auto "
        "(the PCIe links that this process crosses), or names of stand-in links",
    )
    switch_groups: Literal["auto", "all", "none"] = _setting(
        "auto",
        "groups that may get new connections: all, none, or auto: all but those over NCCL where "
        "paths are off, or every RDMA device can change live queue pairs; those that may not keep "
        "torch's own backend if torch has hooks enough",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = _setting(
        "WARNING",
        "the least severe messages that Crux writes to stderr: debug, info, warning or error",
    )
    quiet: bool = _setting(False, "print no summary when the job ends")
    profile_s: Positive = _setting(
        10.0, "the longest that a job holds the top level to be measured, in seconds"
    )
    lease_s: Span = _setting(
        6.0, "seconds after which a job that gives no sign of life counts as gone"
    )
    device_flops: NotNegative = _setting(
        0.0,
        "FLOP/s of one device, to estimate W from time and to bound what jobs claim; 0 means that "
        "Crux looks it up",
    )
    metrics: MetricsPort = _setting(
        0,
        "port at which rank 0's host serves the job's metrics to a Prometheus, on its loopback "
        "only (docs/operate/metrics.md); 0 means none",
    )
    trace: str = _setting("", "folder in which every rank writes a Chrome trace at exit")
    # Constants for users; tests and experiments change them with CRUX_TUNING.
    nccl_class: bool = _tuning(True)  # set the traffic class of each new NCCL communicator
    link_wait_ms: WaitMs = _tuning(500.0)  # longest wait of an operation on the host's links
    #: Longest wait of ranks for each other in a switch; on a device also of an operation for it.
    switch_timeout_s: Positive = _tuning(30.0)
    profile_iterations: Count = _tuning(12)  # iterations after which a measurement may end early
    warmup_iterations: Count = _tuning(3)  # iterations before a job is measured
    #: When the recorder times operations; otherwise it records calls only, at a third of the cost.
    timing: Literal["measuring", "always"] = _tuning("measuring")
    tables_port: Port = _tuning(29412)  # of the load tables (mlcc), on the topology's host
    slot_ms: SlotMs = _tuning(60.0)  # time for which a flow keeps a rate (mlcc)
    plan_valid_s: Span = _tuning(15.0)  # after that a plan that nobody renews is dropped
    start_s: Span = _tuning(3.0)  # start of the background thread, unless two iterations end before
    tick_s: Tick = _tuning(0.1)  # period of the background thread
    records: Count = _tuning(65536)  # capacity of the recorder's ring

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Returns the settings in ``env``. An empty variable is the default.

        Raises:
            SettingsError: a value can't be used.
        """
        texts = [(setting, env.get(setting.env)) for setting in SETTINGS]
        texts += _tuned(env.get(TUNING_VARIABLE, ""))
        values: dict[str, Any] = {}
        for setting, text in texts:
            if text:
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
        if 0 < self.metrics < 1024:
            raise SettingsError(f"CRUX_METRICS={self.metrics}: expected {_OR_ZERO}")
        if 0 < self.max_slowdown < 1:
            expected = "a number of 1 or more, or 0 for no bound"
            raise SettingsError(f"CRUX_MAX_SLOWDOWN={self.max_slowdown:g}: expected {expected}")
        alone = {"auto", "none"}.isdisjoint(self.links) or len(self.links) == 1
        if not alone or len(set(self.links)) < len(self.links):
            raise SettingsError(f"CRUX_LINKS={','.join(self.links)!r}: expected {_LINKS}")

    @property
    def usable_levels(self) -> tuple[int, ...]:
        """Levels that Crux may use, ascending."""
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
        """DSCP value of Crux's own messages: the highest level's, or 0 if TCP is not marked."""
        tcp = self.marks.tcp
        return tcp[self.marks.measuring_level] if tcp and not self.dry_run else 0


class Setting(NamedTuple):
    """One field of :class:`Settings`, as users see it.

    ``meaning`` has no full stop, and is empty for a value of ``CRUX_TUNING``.
    """

    field: str
    kind: Any
    default: Any
    meaning: str

    @property
    def env(self) -> str:
        """Environment variable; for a value of ``CRUX_TUNING`` also the name in it."""
        return f"CRUX_{self.field.upper()}" if self.meaning else f"{TUNING_VARIABLE}: {self.field}"

    @property
    def flag(self) -> str:
        """Flag of ``cruxrun``. A flag without a value sets the opposite of the default."""
        name = self.field.replace("_", "-")
        return f"--crux-{'no-' if self.default is True else ''}{name}"

    @property
    def default_text(self) -> str:
        """Default as it would be written in the variable."""
        return self.text_of(self.default)

    def text_of(self, value: Any) -> str:
        """Returns ``value`` as it would be written in the variable."""
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return f"{value:g}" if isinstance(value, (bool, float)) else str(value)

    def parse(self, text: str) -> Any:
        """Returns the value that ``text`` stands for; a ValueError says what was expected."""
        if self.kind is bool:
            return parse_boolean(text)
        base, expected = self.kind, "text"
        if get_origin(base) is Annotated:
            base, meta = get_args(base)
            expected = meta.title
        if get_origin(base) is Literal:
            expected = f"one of {', '.join(get_args(base))}"
        try:
            return msgspec.convert(_builtin(base, text.strip()), self.kind, strict=False)
        except (ValueError, msgspec.ValidationError):
            raise ValueError(f"expected {expected}") from None


def _builtin(kind: Any, text: str) -> Any:
    """``text`` as the plain value that msgspec converts to ``kind``."""
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
_ALL = tuple(
    Setting(f.name, _KINDS[f.name], f.default, f.metadata["meaning"]) for f in fields(Settings)
)
#: Settings of users, in the order of the fields: the source of `cruxrun --help` and of the docs.
SETTINGS = tuple(setting for setting in _ALL if setting.meaning)
#: Values that ``CRUX_TUNING`` can set.
TUNING = tuple(setting for setting in _ALL if not setting.meaning)


def _tuned(text: str) -> Iterator[tuple[Setting, str]]:
    """Yields each value that the text of ``CRUX_TUNING`` sets."""
    names = {setting.field: setting for setting in TUNING}
    for part in text.split(",") if text.strip() else ():
        name, _, value = (word.strip() for word in part.partition("="))
        if not value or name not in names:
            known = ", ".join(names)
            raise SettingsError(
                f"{TUNING_VARIABLE}={text!r}: expected NAME=VALUE,NAME=VALUE, names are {known}"
            )
        yield names[name], value


def process_settings() -> Settings:
    """Returns the settings of this process, parsed anew only if its environment has changed.

    Raises:
        SettingsError: a value can't be used.
    """
    names = [TUNING_VARIABLE, *(setting.env for setting in SETTINGS)]
    return _parsed(tuple((name, os.environ[name]) for name in names if name in os.environ))


@functools.lru_cache(maxsize=1)
def _parsed(variables: tuple[tuple[str, str], ...]) -> Settings:
    return Settings.from_env(dict(variables))


def is_attached_by_environment() -> bool:
    """True if the end of ``import torch`` attaches Crux in this process."""
    return is_true(os.environ.get(ATTACH_VARIABLE))


def is_launched() -> bool:
    """True if ``cruxrun`` launched this process, or a process above it."""
    return os.environ.get(LAUNCHED_VARIABLE) == "1"


def settings_table() -> str:
    """Returns every setting of users as a Markdown table: what docs/operate/settings.md shows."""
    rows = ["| variable | flag of cruxrun | default | meaning |", "|---|---|---|---|"]
    for s in SETTINGS:
        default = f"`{s.default_text}`" if s.default_text else ""
        rows.append(f"| `{s.env}` | `{s.flag}` | {default} | {s.meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())
