"""The end of ``import torch``: attach Crux to a script that ``cruxrun`` launched.

Registered in the entry-point group ``torch.backends``, so every process that imports torch runs
:func:`attach_if_launched`. Without ``CRUX_ATTACH`` that only looks at the environment. By then
``torch.distributed`` is imported (torch 2.11 to 2.15), so nothing has to be deferred.
"""

import sys

from cruxrun.launched import is_launched


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
        elif not _being_imported("crux_torch.c10d.backend"):
            from crux_torch.c10d import backend

            backend.register()
    except Exception as error:
        # Not warnings.warn: under -W error it would raise.
        import logging

        logging.getLogger("crux_torch").warning(
            "Crux is not attached, training goes on with the stock backends: %s: %s",
            type(error).__name__,
            error,
        )


def _being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "_initializing", False)
