"""The end of ``import torch``: attach Crux where ``CRUX_ATTACH`` is true (cruxrun, ``crux env``).

Registered in the entry-point group ``torch.backends``, so every process that imports torch runs
:func:`attach_if_launched`. Without that variable, it only looks at the environment and the loaded
modules. By then ``torch.distributed`` is imported (torch 2.11 to 2.15),
so nothing has to be deferred.
"""

import os
import sys


def attach_if_launched() -> None:
    """Attach Crux where ``CRUX_ATTACH`` is true; register its backend where it is loaded.

    Never raises: torch turns an error of an entry point into a failed ``import torch``. If
    attaching fails, one warning says so and the script runs on the stock backends.
    """
    text, imported = os.environ.get("CRUX_ATTACH"), "crux_torch" in sys.modules
    # Importing crux_torch would cost every process of the machine.
    if not text and not imported:
        return
    try:
        import crux_torch

        if text and _attaches(text):
            crux_torch.attach()
        elif imported and not _being_imported("crux_torch.backend.register"):
            from crux_torch.backend import register

            register.register()
    except Exception as error:
        # Not warnings.warn: under -W error it would raise.
        import logging

        logging.getLogger("crux_torch").warning(
            "Crux is not attached, training goes on with the stock backends: %s: %s",
            type(error).__name__,
            error,
        )


def _attaches(text: str) -> bool:
    from crux_torch.booleans import parse_boolean

    try:
        return parse_boolean(text)
    except ValueError as error:
        raise ValueError(f"CRUX_ATTACH={text!r}: {error}") from None


def _being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "_initializing", False)
