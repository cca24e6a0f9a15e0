"""The end of ``import torch``: attach Crux to a script that ``cruxrun`` launched.

Registered in the entry-point group ``torch.backends``, so every process that imports torch runs
:func:`attach_if_launched`; without ``CRUX_ATTACH`` it is one look at the environment. By then
``torch.distributed`` is imported (torch 2.11 to 2.15), so nothing has to be deferred.
"""

import os
import sys

# typing.TYPE_CHECKING would import typing, in every process that imports torch.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_FALSE = ("", "0", "false", "no", "off")


def _set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in _FALSE


def is_launched() -> bool:
    """Whether this process was launched by ``cruxrun``, and Crux is not switched off in it."""
    return _set("CRUX_ATTACH") and not _set("CRUX_DISABLE")


def attach_if_launched() -> None:
    """Attach Crux in a process that ``cruxrun`` launched; register its backend where it is loaded.

    Never raises: torch turns an error of an entry point into a failed ``import torch``. Where
    attaching fails, one warning says so and the script runs on the stock backends.
    """
    launched = is_launched()
    if not launched and "crux_torch" not in sys.modules:
        return
    try:
        import crux_torch

        if launched:
            crux_torch.attach()
        elif not _being_imported("crux_torch.backend"):
            from crux_torch import backend

            backend.register()
    except Exception as error:
        # Not warnings.warn: under -W error it would raise.
        import logging

        logging.getLogger("crux_torch").warning(
            "Crux is not attached, training goes on with the stock backends: %s: %s",
            type(error).__name__,
            error,
        )


def obstacle(env: "Mapping[str, str]") -> "str | None":
    """What keeps ``import torch`` from calling :func:`attach_if_launched`, or None.

    Args:
        env: the environment of the process that will import torch.
    """
    switch = env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if switch != "1":
        return f"TORCH_DEVICE_BACKEND_AUTOLOAD={switch} switches torch's entry points off"

    from importlib.metadata import entry_points

    entry = f"{attach_if_launched.__module__}:{attach_if_launched.__name__}"
    if not any(e.value == entry for e in entry_points(group="torch.backends")):
        return "the entry point of the group torch.backends is not installed"
    return None


def _being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "_initializing", False)
