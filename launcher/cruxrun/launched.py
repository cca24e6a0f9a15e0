"""Whether ``cruxrun`` launched this process, and whether ``import torch`` will attach Crux to one.

Imports next to nothing, because every process that imports torch imports this.
"""

import os

# typing.TYPE_CHECKING would import typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: The function that ``import torch`` calls: the target of our entry point in ``torch.backends``.
ENTRY_POINT = "cruxrun.autoload:attach_if_launched"

_FALSE = ("", "0", "false", "no", "off")


def _set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in _FALSE


def is_launched() -> bool:
    """Whether this process was launched by ``cruxrun``, and Crux is not switched off in it."""
    return _set("CRUX_ATTACH") and not _set("CRUX_DISABLE")


def obstacle(env: "Mapping[str, str]") -> "str | None":
    """What keeps ``import torch`` from attaching Crux, or None.

    Args:
        env: the environment of the process that will import torch.
    """
    switch = env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if switch != "1":
        return f"TORCH_DEVICE_BACKEND_AUTOLOAD={switch} switches torch's entry points off"

    from importlib.metadata import entry_points

    if not any(e.value == ENTRY_POINT for e in entry_points(group="torch.backends")):
        return "the entry point of the group torch.backends is not installed"
    return None
