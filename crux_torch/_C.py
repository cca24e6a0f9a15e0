"""The C++ extension that was built for the installed torch.

An extension works with one minor release of torch. So a wheel holds one for each release that it
supports, ``_C_torch2_15`` and others; importing this module gives the one that fits.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch


def _fitting() -> ModuleType:
    release = ".".join(torch.__version__.split(".")[:2])
    name = f"crux_torch._C_torch{release.replace('.', '_')}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    files = Path(__file__).parent.glob("_C_torch*.so")
    built = sorted({f.name.split(".")[0].removeprefix("_C_torch").replace("_", ".") for f in files})
    remedy = (
        "build crux-torch for it: in a checkout of its source, run "
        "`pip install --no-build-isolation --no-deps .`"
    )
    if not built:
        raise ModuleNotFoundError(
            f"crux-torch was installed without its extension for torch; {remedy}", name=name
        )
    raise ImportError(
        f"torch {torch.__version__} is installed, but this crux-torch was built for torch "
        f"{' and '.join(built)}: install one of these releases, or {remedy}",
        name=name,
    )


sys.modules[__name__] = _fitting()
