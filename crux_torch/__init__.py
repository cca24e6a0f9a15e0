"""Crux: GPU-efficient communication scheduling for deep learning jobs that share a cluster.

Importing it registers the backend ``crux`` with torch.distributed. Under ``cruxrun`` a script needs
no import at all.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from crux_torch._version import __version__
from crux_torch.backend import set_listener
from crux_torch.booleans import is_true

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch.distributed.debug._frontend import DebugHandler

    from crux_torch.agent.training_tools import TensorBoard, Writer
    from crux_torch.backend import Listener
    from crux_torch.measure.profile import JobProfile

__all__ = [
    "__version__",
    "attach",
    "count_flops",
    "debug_handler",
    "profile",
    "status",
    "tensorboard",
]


def _listener() -> Listener:
    from crux_torch.agent import AGENT

    return AGENT


set_listener(_listener)

# The simulator and the command line do not need torch. If a program imports torch later, torch's
# entry points register the backend: see ``cruxrun.autoload``.
if "torch" in sys.modules:
    from crux_torch.backend import register as _backend

    _backend.register()


def attach() -> None:
    """Make the script's own ``init_process_group("nccl" | "gloo" | None)`` use Crux.

    ``cruxrun`` calls it in each process of a job, so scripts that it starts need not. A second call
    changes nothing. With ``CRUX_DISABLE`` set it does nothing. It leaves process groups alone that
    exist already.
    """
    from crux_torch.backend import register

    register.attach()


def count_flops(flops: float) -> None:
    """Say that one iteration takes ``flops`` FLOPs on this rank, in place of what Crux counts.

    For a script whose operators Crux can't see (docs/understand/measuring.md). It holds from the
    next measurement on, until the next call; 0 gives the counting back to Crux.

    Raises:
        ValueError: negative, or not a finite number.
    """
    from crux_torch.measure import flops as meter

    meter.give_flops(flops)


def profile() -> JobProfile | None:
    """Returns the profile of the whole job, or None before the first measurement is complete.

    Every rank gets the same profile, from the job's leader (rank 0).
    """
    from crux_torch.agent import AGENT

    return AGENT.profile()


def status() -> dict[str, Any]:
    """Returns the state of Crux in this process, as plain values.

    Some of the keys:

    - ``active``, ``why_not``: whether Crux works in this process, and if not, why.
    - ``unreached``: what takes traffic out of Crux's reach, and how (docs/operate/classes.md).
    - ``settings``, ``recorder``: the settings in force, and the recorder's counters.
    - ``profile``, ``plan``: the job's profile, and its entry in the plan.
    - ``applied``: the class of each connection, or why it was refused.
    - ``paths``: the path that each connection takes (docs/understand/paths.md).
    - ``links``: operations that waited on links of the host (docs/understand/host.md).
    - ``leader``: on rank 0, its part in the plan; in it ``left_out``, what Crux does not do.
    - ``hosts``: on rank 0, the ranks on each host, and what is wrong with the hosts' names.
    """
    from crux_torch.agent import AGENT

    return AGENT.status()


def tensorboard(
    writer: Writer, *, every_s: float = 5.0, step: Callable[[], int] | None = None
) -> TensorBoard:
    """Writes this job's curves to TensorBoard from now on, at the ends of optimizer steps.

    Curves: ``crux/step_s``, and once they are known ``period_s``, ``alone_s``, ``exposed_share``,
    ``W_flops``, ``t_s``, ``intensity_flops_per_s``, ``level``, ``plan_epoch``; and a text,
    ``crux/plan``, whenever the plan changes. Call it on the rank that has the writer.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        every_s: seconds between two values of a curve at least.
        step: returns the step number for the x-axis; default: optimizer steps counted from here.

    Returns:
        an object whose ``close()`` ends it.

    Raises:
        CruxError: ``every_s`` is negative.
    """
    from crux_torch.agent.training_tools import TensorBoard

    board = TensorBoard(writer, status, every_s, step)
    board.install()
    return board


def debug_handler() -> DebugHandler:
    """Returns a page with the status of Crux on all ranks, for torch's debug server.

    All ranks call it, and pass it on: ``start_debug_server(handlers=[*default_handlers(),
    crux_torch.debug_handler()])``. The page is ``/crux``.

    Raises:
        CruxError: this torch has no such server (it came with 2.11), or jinja2 is missing.
    """
    from crux_torch.errors import CruxError

    try:
        from crux_torch.agent import debug_page
    except ImportError as error:
        raise CruxError(f"no debug server: {error}; it needs torch 2.11 or newer, jinja2") from None
    return debug_page.CruxHandler()


# Under cruxrun, ``import torch`` attaches Crux at its end, which imports modules of this package.
# If one of them had imported torch, it would be only half imported then. So import torch here.
# Not settings.is_launched: a Python without msgspec reads what a host has (pyverbs).
if is_true(os.environ.get("CRUX_ATTACH")):
    import_module("torch")
