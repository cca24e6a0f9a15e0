"""Crux: GPU-efficient communication scheduling for deep learning jobs that share a cluster.

Importing it registers the backend ``crux`` with torch.distributed. Under ``cruxrun`` a script needs
no import at all.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from crux_torch._version import __version__
from crux_torch.c10d import events
from cruxrun.launched import is_launched

if TYPE_CHECKING:
    from typing import Any

    from crux_torch.c10d.events import Listener
    from crux_torch.measure.job_profile import JobProfile

__all__ = ["__version__", "attach", "count_flops", "profile", "status"]


def _runtime() -> Listener:
    from crux_torch import runtime

    return runtime


events.listen(_runtime)

# The simulator and the command line do not need torch. If a program imports torch later, torch's
# entry points register the backend: see ``cruxrun.autoload``.
if "torch" in sys.modules:
    from crux_torch.c10d import backend as _backend

    _backend.register()


def attach() -> None:
    """Make the script's own ``init_process_group("nccl" | "gloo" | None)`` use Crux.

    ``cruxrun`` calls it in each process of a job, so scripts that it starts need not. A second call
    changes nothing. With ``CRUX_DISABLE`` set it does nothing. It leaves process groups alone that
    exist already.
    """
    from crux_torch.c10d import backend

    backend.attach()


def count_flops(flops: float) -> None:
    """Say that one iteration takes ``flops`` FLOPs on this rank, in place of what Crux counts.

    For a script whose operators Crux can't see (docs/work.md). It holds from the next measurement
    on, until the next call; 0 gives the counting back to Crux.

    Raises:
        ValueError: negative, or not a finite number.
    """
    from crux_torch.measure import flops as meter

    meter.tell(flops)


def profile() -> JobProfile | None:
    """The profile of the whole job, or None before the first measurement is complete.

    Every rank gets the same profile, from the job's leader (rank 0).
    """
    from crux_torch import runtime

    return runtime.profile()


def status() -> dict[str, Any]:
    """What Crux sees and does in this process, as plain values.

    Some of the keys:

    - ``active``, ``why_not``: whether Crux works in this process, and if not, why.
    - ``unreached``: what takes traffic out of Crux's reach, and how (docs/classes.md).
    - ``settings``, ``recorder``: the settings in force, and the recorder's counters.
    - ``profile``, ``plan``: the job's profile, and its entry in the plan.
    - ``applied``: the class of each connection, or why it was refused.
    - ``paths``: the path that each connection takes (docs/paths.md).
    - ``links``: operations that waited on links of the host (docs/pcie.md).
    - ``leader``: on rank 0, its part in the plan; in it ``left_out``, what Crux does not do.
    - ``hosts``: on rank 0, the ranks on each host, and what is wrong with the hosts' names.
    """
    from crux_torch import runtime

    return runtime.status()


# Under cruxrun, ``import torch`` attaches Crux at its end, which imports modules of this package.
# If one of them had imported torch, it would be only half imported then. So import torch here.
if is_launched():
    import_module("torch")
