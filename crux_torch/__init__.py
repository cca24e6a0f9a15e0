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

__all__ = ["__version__", "attach", "profile", "status"]


def _runtime() -> Listener:
    from crux_torch import runtime

    return runtime


events.listen(_runtime)

# A program that uses only the simulator or the command line does without torch. Where torch is
# imported later, its entry points register the backend: see ``cruxrun.autoload``.
if "torch" in sys.modules:
    from crux_torch.c10d import backend as _backend

    _backend.register()


def attach() -> None:
    """Make the script's own ``init_process_group("nccl" | "gloo" | None)`` use Crux.

    What ``cruxrun`` does for a script that does not know Crux. Idempotent, and nothing at all where
    ``CRUX_DISABLE`` is set; process groups that exist already are left as they are.
    """
    from crux_torch.c10d import backend

    backend.attach()


def profile() -> JobProfile | None:
    """What was measured of this job, or None before the first measurement is complete.

    The leader rank has the profile of the whole job, and every rank gets it from its leader.
    """
    from crux_torch import runtime

    return runtime.profile()


def status() -> dict[str, Any]:
    """What Crux sees and does in this process, as plain values.

    ``settings`` in force, ``recorder`` counters, ``job`` and ``leader``, ``profile``, the ``plan``
    in force, under ``applied`` how each setting was applied to each connection, or why not, under
    ``paths`` which way each goes that the plan has a path for (``docs/paths.md``), and under
    ``links`` what gives way on links of the host (``docs/pcie.md``).
    """
    from crux_torch import runtime

    return runtime.status()


# What attaches must not find a module of this package half imported: so torch comes before them.
if is_launched():
    import_module("torch")
