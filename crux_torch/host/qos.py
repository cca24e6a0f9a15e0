"""Reads the treatment of DSCP values by this host's interfaces: trust, priorities, PFC, buffers.

``mlnx_qos`` knows most (NVIDIA's driver); ``dcb`` of iproute2 is asked where it does not answer.
Unknown facts are None or empty, never an error.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from crux_torch.host.interfaces import SYSFS, entries, number, pci_address, text

#: The output of a command; None if it is not installed, or fails.
Run = Callable[[Sequence[str]], str | None]
TIMEOUT_S = 5.0
PRIORITIES = 8
_ROW = re.compile(r"^\s*(enabled|buffer)((?:\s+\d+){8})\s*$", re.MULTILINE)
_CLASS = re.compile(r"tsa:\s*(strict|ets|vendor)[^\n]*((?:\s*priority:\s*\d)*)")
_PRIO = re.compile(r"prio:\s*(\d)\s+dscp:([\d,\s]*)")


@dataclass(frozen=True, slots=True)
class InterfaceQos:
    """The treatment of packets by one interface.

    Attributes:
        trust: the field that decides a packet's priority.
        priority_of: by DSCP value, as far as it is known.
        pfc: by priority, True if it is lossless; empty: not known.
        buffer_of: by priority, the receive buffer; empty: not known.
        buffer_bytes: by buffer; empty: not known.
        algorithms: by priority, the scheduler of its class: ``strict``, ``ets`` or ``vendor``.
        cnp_dscp: of congestion notification packets that this interface sends.
        shares_queues: reason why the kernel sends all DSCP values of TCP alike; empty: none.
    """

    name: str
    trust: Literal["dscp", "pcp"] | None = None
    priority_of: Mapping[int, int] = field(default_factory=dict)
    pfc: tuple[bool, ...] = ()
    buffer_of: tuple[int, ...] = ()
    buffer_bytes: tuple[int, ...] = ()
    algorithms: Mapping[int, str] = field(default_factory=dict)
    cnp_dscp: int | None = None
    shares_queues: str = ""

    def is_lossless(self, dscp: int) -> bool | None:
        """True if PFC protects packets with this value; None if that is not known."""
        priority = self.priority_of.get(dscp)
        return self.pfc[priority] if priority is not None and self.pfc else None


def output_of(command: Sequence[str]) -> str | None:
    """See :data:`Run`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def interfaces(sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Returns the network interfaces that have a device behind them and are up."""
    return tuple(
        entry.name
        for entry in entries(sysfs / "class/net")
        if (entry / "device").exists() and text(entry / "operstate").strip() == "up"
    )


def read(name: str, run: Run = output_of, sysfs: Path = SYSFS) -> InterfaceQos:
    """Returns the configuration of the interface ``name``."""
    output = run(("mlnx_qos", "-i", name))
    found = _parse_mlnx_qos(output) if output is not None else _read_dcb(name, run)
    return InterfaceQos(
        name,
        cnp_dscp=_cnp_dscp(sysfs, name),
        shares_queues=_parse_tc(run(("tc", "-j", "qdisc", "show", "dev", name))),
        **found,
    )


def _cnp_dscp(sysfs: Path, name: str) -> int | None:
    """As NVIDIA's driver says it, or that of the kernel, where root alone may read it."""
    interface = sysfs / "class/net" / name
    function = pci_address(interface / "device") or "-"
    files = (
        interface / "ecn/roce_np/cnp_dscp",
        sysfs / "kernel/debug/mlx5" / function / "cc_params/np_cnp_dscp",
    )
    output = (number(text(file).strip()) for file in files)
    return next((int(dscp) for dscp in output if dscp is not None and 0 <= dscp < 64), None)


def _parse_mlnx_qos(output: str) -> dict[str, Any]:
    trust = re.search(r"Priority trust state:\s*(dscp|pcp)", output)
    rows = {name: tuple(map(int, values.split())) for name, values in _ROW.findall(output)}
    sizes = re.search(r"Receive buffer size \(bytes\):\s*([\d,\s]+)", output)
    return {
        "trust": trust[1] if trust else None,
        "priority_of": {
            int(dscp): int(priority)
            for priority, values in _PRIO.findall(output)
            for dscp in re.findall(r"\d+", values)
        },
        "algorithms": {
            int(priority): algorithm
            for algorithm, lines in _CLASS.findall(output)
            for priority in re.findall(r"priority:\s*(\d)", lines)
        },
        "pfc": tuple(map(bool, rows.get("enabled", ()))),
        "buffer_of": rows.get("buffer", ()),
        "buffer_bytes": tuple(map(int, re.findall(r"\d+", sizes[1]))) if sizes else (),
    }


def _read_dcb(name: str, run: Run) -> dict[str, Any]:
    parts = ("app", "pfc", "buffer", "ets")
    app, pfc, buffers, ets = (
        _json(run(("dcb", "-j", part, "show", "dev", name))) for part in parts
    )
    classes, algorithms = _eight(ets, "prio_tc"), _eight(ets, "tc_tsa")
    pairs = [pair for pair in _rows(app, "dscp_prio") if isinstance(pair, list) and len(pair) == 2]
    return {
        # A driver looks at DSCP values as soon as its table has one.
        "trust": "dscp" if pairs else None,
        "priority_of": {d: p for d, p in pairs if _is_number(d, 64) and _is_number(p, PRIORITIES)},
        "algorithms": {
            priority: str(algorithms[tc])
            for priority, tc in enumerate(classes)
            if algorithms and _is_number(tc, PRIORITIES)
        },
        "pfc": tuple(on in (True, "on") for on in _eight(pfc, "prio_pfc")),
        "buffer_of": tuple(n for n in _eight(buffers, "prio_buffer") if _is_number(n, PRIORITIES)),
        "buffer_bytes": tuple(n for n in _eight(buffers, "buffer_size") if _is_number(n, 1 << 40)),
    }


def _parse_tc(output: str | None) -> str:
    """``mqprio`` sorts by the socket's priority, which is one for all class selectors."""
    try:
        disciplines = json.loads(output or "[]")
    except ValueError:
        return ""
    for one in disciplines if isinstance(disciplines, list) else ():
        if isinstance(one, dict) and one.get("kind") == "mqprio":
            options = one.get("options", {})
            count = options.get("tc", 1) if isinstance(options, dict) else 1
            if _is_number(count, 17) and count > 1:
                return f"qdisc mqprio of {count} traffic classes"
    return ""


def _json(output: str | None) -> dict[str, Any]:
    try:
        found = json.loads(output or "{}")
    except ValueError:
        return {}
    if isinstance(found, list):  # iproute2 of some releases wraps what it tells of a device
        found = next((one for one in found if isinstance(one, dict)), {})
    return found if isinstance(found, dict) else {}


def _rows(output: dict[str, Any], name: str) -> list[Any]:
    rows = output.get(name, [])
    return rows if isinstance(rows, list) else []


def _eight(output: dict[str, Any], name: str) -> list[Any]:
    rows = _rows(output, name)
    return rows if len(rows) == PRIORITIES else []


def _is_number(value: object, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
