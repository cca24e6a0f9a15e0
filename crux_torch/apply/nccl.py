"""Gives a NCCL communicator its traffic class when it is made.

NCCL has no call that changes the class later, so communicators keep it until a switch of inner
backends replaces them. It is ``ncclConfig_t.trafficClass``: the whole TOS byte with its ECN bits
(:mod:`crux_torch.apply.ecn`), which torch takes as ``Options().config.traffic_class``. Over sockets
NCCL ignores it; there the sockets themselves are marked.

A class that the user chose stays: the script's in its options, or the operator's in NCCL's own
variables, in the environment or in ``nccl.conf``, which NCCL ranks above the options.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from crux_torch.apply.ecn import of_this_process
from crux_torch.apply.nccl_conf import ENVIRONMENT, NcclVariables
from crux_torch.apply.nccl_labels import LABELS, NcclLabels
from crux_torch.warn_once import WarnOnce

#: NCCL_CONFIG_UNDEF_INT of <nccl.h>: the script chose none.
UNDEFINED = -(1 << 31)

#: NCCL's own variables, and how each changes the class of a communicator.
OVERRIDES = {
    "NCCL_IB_TC": "NCCL makes its queue pairs with that class, whatever level the job has",
    "NCCL_IB_FIFO_TC": "NCCL's clear-to-send messages get that class, its data gets the job's",
    "NCCL_IB_SL": "the service level stays, so InfiniBand's lanes and PFC priorities do not follow",
}

#: Variables and modules that take traffic out of Crux's reach, and what then happens to it.
BYPASSES = {
    "NCCL_IB_OOO_RQ": "NCCL makes its queue pairs past the stand-in: class and port stay",
    "NCCL_GIN_IB_TC": "the queue pairs that GPUs drive (GIN) get that class, and no path",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "torchcomms makes the groups: they are not measured",
}
BYPASSING_MODULES = {
    "torchcomms": "its communicators are not measured, and get no class",
    "nccl.core": "communicators that nccl4py makes are not measured, and get no class",
}

_warn = WarnOnce(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Override:
    """A variable of NCCL that overrides a communicator's class, as ``what`` says."""

    name: str
    value: int
    source: str
    what: str

    def __str__(self) -> str:
        where = "" if self.source == ENVIRONMENT else f" in {self.source}"
        return f"{self.name}={self.value}{where}"


def overrides(env: Mapping[str, str]) -> list[Override]:
    """The variables in the environment ``env`` that override the class of communicators."""
    variables = NcclVariables(env)
    said = {name: (variables.integer(name), variables.get(name)) for name in OVERRIDES}
    return [
        Override(name, number, value.source, OVERRIDES[name])
        for name, (number, value) in said.items()
        if number is not None and value is not None
    ]


def has_users_class(env: Mapping[str, str]) -> bool:
    """True if ``NCCL_IB_TC`` is set in the environment ``env``, or in NCCL's files."""
    return NcclVariables(env).integer("NCCL_IB_TC") is not None


def unreached(env: Mapping[str, str], modules: Collection[str] = ()) -> dict[str, str]:
    """What takes traffic out of Crux's reach, by the name of its variable or loaded module."""
    variables = NcclVariables(env)
    said = {name: variables.get(name) for name in BYPASSES}
    found = {name: BYPASSES[name] for name, value in said.items() if value and value.text != "0"}
    return found | {name: what for name, what in BYPASSING_MODULES.items() if name in modules}


def with_class(
    options: Any,
    dscp: int | None,
    *,
    new: Any,
    owner: str = "",
    env: Mapping[str, str] | None = None,
    labels: NcclLabels = LABELS,
    ecn: int | None = None,
) -> Any:
    """The script's options for a NCCL communicator, with the job's class added.

    The script's own object is not changed, because it may use it for the next group too. If the
    class can't be given, or has no effect, a warning says why, once for each process. Never raises;
    after an error it returns ``options`` unchanged.

    Args:
        dscp: DSCP of the job's level (0 to 63), or None if there is none yet.
        new: creates empty options: ``ProcessGroupNCCL.Options``.
        owner: name of the group; default: the one in ``options``.
        env: NCCL's variables; default: this process's environment.
        labels: with the stand-in for libibverbs one of them replaces the class.
        ecn: the two ECN bits; default: those for the settings and this host's devices.
    """
    try:
        ecn = of_this_process().bits if ecn is None else ecn
        owner = owner or getattr(options, "group_name", "")
        label = labels.give(owner, ecn)
        traffic_class = label if label is not None else None if dscp is None else dscp << 2 | ecn
        if traffic_class is None:
            return options
        return _with_class(options, traffic_class, new, os.environ if env is None else env)
    except Exception as error:
        _warn("options", f"NCCL communicators get no traffic class: {error}")
        return options


def _with_class(options: Any, traffic_class: int, new: Any, env: Mapping[str, str]) -> Any:
    chosen = UNDEFINED if options is None else options.config.traffic_class
    if chosen != UNDEFINED:
        said = f"the script's traffic_class={chosen} for NCCL stays, whatever level it has"
        _warn("chosen", said)
        return options
    found = overrides(env)
    for override in found:
        _warn(override.name, f"{override} is set: {override.what}")
    if any(override.name == "NCCL_IB_TC" for override in found):
        return options
    classed = new() if options is None else copy.copy(options)
    classed.config.traffic_class = traffic_class
    return classed
