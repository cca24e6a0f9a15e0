"""The traffic class of a NCCL communicator, given to it when it is made.

NCCL writes the class into its queue pairs once, when they connect, and has no call that changes it
later: a job that gets another level keeps the class of its communicators until they are made anew,
which the switch of inner backends does. The class is ``ncclConfig_t.trafficClass``, the whole TOS
byte with its ECN bits (:mod:`crux_torch.apply.ecn`), and reaches NCCL through
``ProcessGroupNCCL.Options().config.traffic_class``. Over sockets (``NCCL_NET=Socket``) NCCL ignores
it; there the sockets themselves are marked.

Whoever chose a class already has the last word: the script by its options, the operator by NCCL's
own variables, in the environment or in ``nccl.conf``, which NCCL ranks above the options.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crux_torch.apply.ecn import of_this_process
from crux_torch.apply.nccl_conf import ENVIRONMENT, NcclVariables
from crux_torch.apply.nccl_labels import LABELS, NcclLabels
from crux_torch.control.warn_once import WarnOnce

#: NCCL_CONFIG_UNDEF_INT of <nccl.h>: the script did not choose.
UNDEFINED = -(1 << 31)

#: NCCL's own variables, and what each leaves of the class that a communicator is given. What they
#: say reaches the address vector, where the stand-in for libibverbs still puts a route's class.
OVERRIDES = {
    "NCCL_IB_TC": "NCCL makes its queue pairs with that class, whatever level the job has",
    "NCCL_IB_FIFO_TC": "NCCL's clear-to-send messages get that class, its data gets the job's",
    "NCCL_IB_SL": "the service level stays, so InfiniBand's lanes and PFC priorities do not follow",
}

_warn = WarnOnce(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Override:
    """A variable of NCCL that beats a communicator's class.

    Attributes:
        name: of the variable.
        value: as NCCL reads it, a number.
        source: ``nccl_conf.ENVIRONMENT``, or the file that says so.
        what: it overrides.
    """

    name: str
    value: int
    source: str
    what: str

    def __str__(self) -> str:
        where = "" if self.source == ENVIRONMENT else f" in {self.source}"
        return f"{self.name}={self.value}{where}"


def overrides(env: Mapping[str, str]) -> list[Override]:
    """What beats the class of the communicators of a process with the environment ``env``."""
    variables = NcclVariables(env)
    found = []
    for name, what in OVERRIDES.items():
        value, said = variables.integer(name), variables.get(name)
        if value is not None and said is not None:
            found.append(Override(name, value, said.source, what))
    return found


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
    """The options to make a NCCL communicator with: the script's, with the job's class in them.

    The script's own object is never changed, because it may serve for the next group too. What
    keeps the class from being given, or from having its effect, is said once a process. Never
    raises: what can't be done leaves ``options`` as they were.

    Args:
        options: what the script gave, or None.
        dscp: DSCP of the job's level (0 to 63), or None where there is none yet.
        new: makes empty options: ``ProcessGroupNCCL.Options``.
        owner: name of the group; by default the one in ``options``.
        env: NCCL's variables; default: this process's environment.
        labels: of this process's communicators: with the stand-in for libibverbs a label takes the
            place of the class, which the stand-in then sees to.
        ecn: the two ECN bits; default: what the settings and this host's devices ask for.
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
        _warn(
            "chosen", f"the script's traffic_class={chosen} for NCCL stays, whatever level it has"
        )
        return options
    found = overrides(env)
    for override in found:
        _warn(override.name, f"{override} is set: {override.what}")
    if any(override.name == "NCCL_IB_TC" for override in found):
        return options
    classed = new() if options is None else copy.copy(options)
    classed.config.traffic_class = traffic_class
    return classed
